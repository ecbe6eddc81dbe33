import dataclasses
import json
import re
import subprocess

import pytest

from nanovllm.bench import result_tables, results
from nanovllm.bench.job import Repeat, RequestTimes, ResultRow, Run, percentile
from nanovllm.bench.results import Record
from nanovllm.hardware.measured_rates import Rates
from nanovllm.hardware.roofline import Work

RATES = Rates("NVIDIA H200", 100.0, 100.0, 90.0, {"bfloat16": 1000.0, "float32": 1000.0})


def row(rate, engine="nanovllm", variant="custom", workload="bs1", error=None, spread=0.0, load="1 x 2 -> 3", **more):
    repeats = [
        Repeat(100 / r, 100, 150, 0.5, 0.6, 0.01, 0.02, 50, 100)
        for r in (rate, rate * (1 - spread), rate * (1 - spread / 2))
    ]
    about = {"device": "NVIDIA H200", "dtype": "bfloat16"}
    return ResultRow(engine, variant, "m", workload, load, error, [] if error else repeats, about=about, **more)


def record(*rows, commit="abc", **arguments):
    versions = {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
    made = Record("2026-01-02 03:04", commit, False, versions, RATES, arguments, list(rows))
    for r in rows:
        results.add_shares(r, RATES)
    return made


def test_the_figures_of_a_run_by_hand():
    # Two requests: 3 tokens at 0.5, 0.6 and 0.8 s, one token at 1 s.
    run = Run(2.0, [RequestTimes(0.5, 0.8, 3, [0.1, 0.2]), RequestTimes(1.0, 1.0, 1, [])])
    r = Repeat.of(run, num_prompt_tokens=6, work=Work(10, 20))
    assert (r.output_tokens, r.total_tokens, r.output_rate, r.total_rate) == (4, 10, 2.0, 5.0)
    assert r.ttft_p50 == 0.75 and r.itl_p50 == pytest.approx(0.15) and r.itl_p99 == pytest.approx(0.199)
    # Where only the ends are known, a request's mean stands for its gaps, and means have no slow tokens; a single token
    # has none.
    ends = [RequestTimes(0.5, 0.8, 3), RequestTimes(1.0, 1.0, 1), RequestTimes(None, None, 2)]
    r = Repeat.of(Run(2.0, ends), 0, Work())
    assert r.itl_p50 == pytest.approx(0.15) and r.itl_p99 is None and r.ttft_p99 == pytest.approx(0.995)
    together = Repeat.of(Run(2.0, ends[:1], gaps=[0.1, 0.2]), 0, Work())
    assert together.itl_p50 == pytest.approx(0.15) and together.itl_p99 == pytest.approx(0.199)
    assert percentile([], 50) is None and percentile([3.0], 99) == 3.0


def test_shares_by_hand():
    r = record(row(10.0)).rows[0]  # 10 s each: 50 of 100 x 10 bytes, 100 of 1000 x 10 flops
    assert r.mbu == pytest.approx(0.05) and r.mfu == pytest.approx(0.01) and r.limit == r.mbu
    assert record(row(10.0, open_loop=True)).rows[0].limit is None  # its time is its arrivals'
    assert record(row(10.0, error="x")).rows[0].limit is None
    other = record(in_dtype(row(10.0), "float16")).rows[0]  # whose rate is not measured
    assert other.mbu == r.mbu and other.mfu is other.limit is None


def test_products_of_8_bit_floats_count_at_their_own_rate():
    def limit(fp8_flops, **matmul):
        r = row(10.0)
        r.repeats = [dataclasses.replace(repeat, flops=12_000, fp8_flops=fp8_flops) for repeat in r.repeats]
        results.add_shares(r, dataclasses.replace(RATES, matmul=RATES.matmul | matmul))
        return r.limit

    assert limit(0) == limit(0, float8=2000.0) == pytest.approx(1.2)
    assert limit(10_000, float8=2000.0) == pytest.approx(0.2 + 0.5)
    # Without their rate, or where they cannot be multiplied in the way that is measured.
    assert limit(10_000) is limit(10_000, float8=0.0) is None


def test_results_of_before_8_bit_floats_were_counted_are_read(tmp_path):
    (path,) = results.keep(record(row(10.0)), tmp_path)
    runs = json.loads(path.read_text())
    for repeat in runs[0]["rows"][0]["repeats"]:
        assert repeat.pop("fp8_flops") == 0
    path.write_text(json.dumps(runs))
    assert results.load_runs(path)[0].rows == [record(row(10.0)).rows[0]]


def test_quantised_weights_on_a_cpu_have_no_share_of_the_rate_of_float_products():
    quantised = row(1e-3)  # 1000 times too many flops would be 100 % of something else
    quantised.repeats = [dataclasses.replace(r, flops=10**9) for r in quantised.repeats]
    quantised.about["quantised"] = True
    r = record(quantised).rows[0]
    assert r.mfu is None and r.limit == r.mbu is not None


def test_what_is_kept_comes_back(tmp_path):
    failed = row(1.0, engine="vllm", error="not installed")
    kept = record(row(10.0), row(5.0, variant="native"), row(7.0, workload="bs8"), failed)
    paths = results.keep(kept, tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["nvidia-h200/bs1.json", "nvidia-h200/bs8.json"]
    (run,) = results.load_runs(paths[0])
    assert run.rows == kept.rows[:2] and run.rates == RATES and run.versions == kept.versions and run.commit == "abc"
    results.keep(record(row(12.0), commit="def"), tmp_path)
    assert [r.commit for r in results.load_runs(paths[0])] == ["abc", "def"]
    assert results.load_runs(tmp_path / "nothing.json") == []
    paths[0].write_text("{")
    with pytest.raises(ValueError, match="bs1.json is not a file of kept results"):
        results.load_runs(paths[0])


def test_history_shows_what_changed(tmp_path):
    results.keep(record(row(1000.0), row(500.0, variant="native")), tmp_path)
    (path,) = results.keep(record(row(1100.0), commit="def"), tmp_path)
    title, _, custom, *runs = result_tables.history_lines(path)
    assert title == "bs1 on nvidia-h200" and custom == "  1 x 2 -> 3, m, nanovllm custom" and len(runs) == 4
    assert "abc" in runs[0] and "1,000 " in runs[0] and "500.0%" in runs[0]
    assert "def" in runs[1] and re.search(r"1,100 +\+10.0%", runs[1]) and runs[2].endswith("nanovllm native")
    assert all(len(line) <= 80 for line in runs)


def test_the_best_share_of_the_limit_is_that_of_the_best_repeat():
    of_rounds = row(20.0)
    of_rounds.repeats = [
        dataclasses.replace(row(rate).repeats[0], round=number) for rate, number in [(20.0, 0)] * 3 + [(40.0, 1)]
    ]
    best = record(row(40.0)).rows[0].limit
    assert results.ratios(record(of_rounds).rows[0], [])["share of the limit"] == pytest.approx(best)


def test_a_check_compares_ratios_not_speeds(tmp_path):
    results.keep(record(row(100.0), row(50.0, variant="native"), row(80.0, engine="vllm", variant="")), tmp_path)

    def slower_machine(ours):
        new = record(row(ours), row(25.0, variant="native"), row(40.0, engine="vllm", variant=""))
        for r in new.rows:  # a machine at half the speed, in its limits too
            r.mbu, r.mfu = r.mbu * 2, r.mfu * 2
        return results.check(new, tmp_path)

    held = slower_machine(50.0)
    ratios = {"share of the limit": 0.5, "times native": 2.0, "times vllm": 1.25}
    assert {c.what: round(c.now, 3) for c in held} == ratios
    assert all(c.holds for c in held) and all(c.holds for c in slower_machine(46.0))
    fell = slower_machine(40.0)
    assert len(fell) == 3 and not any(c.holds for c in fell)
    assert result_tables.check_lines(fell)[0].startswith("FELL bs1: share of the limit 0.400, kept 0.500 (abc)")
    # Noise of either run widens what is allowed, and a lone bad repeat does not count.
    noisy = results.check(record(row(50.0, spread=0.2)), tmp_path)
    assert noisy[0].allowed == pytest.approx(0.10 + 0.2 / 0.9)
    assert results.check(record(row(50.0, spread=0.8)), tmp_path)[0].allowed == 0.5


def test_only_the_same_thing_is_compared(tmp_path):
    results.keep(record(row(100.0)), tmp_path)
    for other in (dict(load="another"), dict(workload="bs8"), dict(variant="no rms_norm")):
        assert results.check(record(row(10.0, **other)), tmp_path) == []


def with_facts(made, **facts):
    made.about = {**made.about, **facts}
    return made


def in_dtype(made, dtype):
    return with_facts(made, dtype=dtype)


OTHERS = [
    (record(row(20.0, load="9 x 2 -> 3")), "9 x 2 -> 3"),
    (record(in_dtype(row(20.0), "float32"), dtype="float32"), "float32"),
    (record(row(20.0), kernels="softmax=native; rms_norm = native"), "kernels rms_norm=native;softmax=native"),
    (record(row(20.0), enforce_eager=True), "enforce_eager"),
    (record(row(20.0), capture_prefill=False), "no capture_prefill"),
    (record(row(20.0), activation_quantization=False), "no activation_quantization"),
    (record(row(20.0), expand_small_weights="off"), "no expand_small_weights"),
    (record(row(20.0), prompt_activations="fp8"), "prompt_activations fp8"),
    (record(row(20.0), piggyback_prefill=False), "no piggyback_prefill"),
    (record(row(20.0), piggyback_prefill=True), "piggyback_prefill"),
    (record(row(20.0), max_num_seqs=4), "max_num_seqs 4"),
    (record(row(20.0), temperature=0.0), "greedy"),
    (record(row(20.0), temperature=0.8, top_p=0.95), "top_p 0.95"),
    (record(row(20.0), cpu_activations="int8"), "activations int8"),
    (record(with_facts(row(20.0), compiled_for="x86-64-v3")), "compiled for x86-64-v3"),
]


@pytest.mark.parametrize("other, words", OTHERS, ids=[words for _, words in OTHERS])
def test_configurations_do_not_replace_each_other(tmp_path, other, words):
    results.keep(record(row(1000.0)), tmp_path)
    (path,) = results.keep(other, tmp_path)
    results.keep(record(row(1100.0)), tmp_path)
    usual, changed, *others = result_tables.history_lines(path)[3:]
    assert "+" not in usual and re.search(r"1,100 +\+10.0%", changed)
    assert words in others[0] and not re.search(r" [+-]\d", others[1]) and len(others) == 2
    table = result_tables.markdown([path])
    for pattern in (r"\| nanovllm custom \| 1,100 \|", r"\| nanovllm custom[^|]* \| 20.0 \|"):
        assert re.search(pattern, table)
    assert words in table and "1,000" not in table
    # Each is checked against its own.
    assert [c.kept for c in results.check(other, tmp_path)] == [other.rows[0].limit]


def test_what_says_nothing_of_the_configuration_does_not_part_it(tmp_path):
    """Old records lack some arguments and have one that is gone; kernels come in any order; a peer has none to
    choose.
    """
    (path,) = results.keep(record(row(100.0), kernels="a=x;b=y", repeat=2), tmp_path)
    results.keep(record(row(200.0), kernels="b = y; a=x", enforce_eager=False, capture_full_steps=True), tmp_path)
    assert "+100.0%" in result_tables.history_lines(path)[4]
    results.keep(record(row(10.0, engine="vllm", variant=""), kernels="a=x"), tmp_path)
    results.keep(record(row(20.0, engine="vllm", variant="")), tmp_path)
    assert "+100.0%" in result_tables.history_lines(path)[7]
    results.keep(record(row(40.0, engine="vllm", variant=""), cpu_activations="int8", top_p=1.0), tmp_path)
    assert "+100.0%" in result_tables.history_lines(path)[8]


def test_a_peer_that_was_compiled_without_a_processors_instructions_is_another_configuration(tmp_path):
    def peer(rate, flags):
        return record(with_facts(row(rate, engine="llama.cpp", variant=""), flags=flags))

    results.keep(peer(40.0, "AVX AVX2 AVX512 AVX512_VNNI"), tmp_path)
    (path,) = results.keep(peer(10.0, "AVX AVX2 FMA"), tmp_path)
    results.keep(peer(44.0, "AVX AVX2 AVX512 AVX512_VNNI"), tmp_path)
    with_avx512, again, without = result_tables.history_lines(path)[3:4] + result_tables.history_lines(path)[4:6]
    assert "+10.0%" in again and "no AVX-512" in without and "no AVX-512" not in with_avx512


def test_peers_may_have_been_kept_by_other_runs(tmp_path):
    results.keep(record(row(40.0, engine="vllm", variant="")), tmp_path)
    results.keep(record(row(100.0)), tmp_path)
    results.keep(record(row(80.0, engine="vllm", variant="")), tmp_path)
    results.keep(record(in_dtype(row(1.0, engine="vllm", variant=""), "float32"), dtype="float32"), tmp_path)
    results.keep(record(row(1.0, engine="vllm", variant=""), enforce_eager=True), tmp_path)

    def now(ours, theirs, **arguments):
        new = record(row(ours), row(theirs, engine="vllm", variant=""), **arguments)
        return {c.what: c for c in results.check(new, tmp_path)}

    assert now(100.0, 80.0)["times vllm"].kept == pytest.approx(1.25) and now(100.0, 80.0)["times vllm"].holds
    assert not now(100.0, 100.0)["times vllm"].holds
    # Kernels of one's own choice are compared with the same peer; and the peer of the same run comes first.
    results.keep(record(row(60.0), kernels="a=x"), tmp_path)
    assert now(60.0, 80.0, kernels="a=x")["times vllm"].kept == pytest.approx(0.75)
    results.keep(record(row(100.0), row(50.0, engine="vllm", variant="")), tmp_path)
    results.keep(record(row(10.0, engine="vllm", variant="")), tmp_path)
    assert now(100.0, 50.0)["times vllm"].kept == pytest.approx(2.0)


def test_lines_of_comparisons():
    rows = [row(100.0), row(40.0, variant="native"), row(80.0, variant="no rms_norm")]
    rows += [row(50.0, engine="vllm", variant=""), row(1, error="x", variant="no y")]
    assert result_tables.comparison_lines(rows) == [
        "bs1: custom kernels are 2.50x native",
        "bs1: rms_norm's custom kernel is worth +25.0% (without it 80.0 tok/s)",
        "bs1: nanovllm is 2.00x vllm",
    ]
    for r in rows[:2]:
        r.about = {"device": "cpu", "kernels": {"rms_norm": "native"}}
    said = "bs1: both rows ran the reference, since no custom kernel ran on cpu"
    assert result_tables.comparison_lines(rows[:2]) == [said]
    assert [result_tables.name_of(r) for r in rows[:3]] == [
        "nanovllm default",
        "nanovllm native",
        "nanovllm no rms_norm",
    ]
    assert result_tables.name_of(row(100.0)) == "nanovllm custom"


def test_a_ratio_is_the_median_of_the_rounds_that_have_both():
    def rounds(rates, **more):
        made = row(1.0, **more)
        made.repeats = [dataclasses.replace(row(rate).repeats[0], round=number) for number, rate in rates]
        return made

    # A machine that becomes ten times slower: 2.0, 3.0 and 2.5 times, where the medians are 20 and 50.
    ours = rounds([(0, 200.0), (1, 30.0), (2, 20.0), (2, 25.0), (2, 90.0), (3, 7.0)])
    theirs = rounds([(0, 100.0), (1, 10.0), (2, 10.0)], engine="vllm", variant="")
    assert ours.medians("output_rate") == pytest.approx({0: 200.0, 1: 30.0, 2: 25.0, 3: 7.0})
    assert ours.median("output_rate") == pytest.approx(27.5)  # of processes, whatever their number of repeats
    assert result_tables.comparison_lines([ours, theirs]) == ["bs1: nanovllm is 2.50x vllm (2.00 to 3.00 in 3 rounds)"]
    apart = rounds([(5, 10.0)], engine="vllm", variant="")
    assert result_tables.comparison_lines([ours, apart]) == ["bs1: nanovllm is 2.75x vllm"]


def test_rows_fit_80_columns():
    narrow, wide = result_tables.TextTable(wide=False), result_tables.TextTable(wide=True)
    long = row(3e6, variant="no layernorm_residual_dropout_gelu", workload="shared-prefix", spread=0.5)
    failed = row(1, error="vllm is not installed; " * 9)
    for table, limit in ((narrow, 80), (wide, 170)):
        lines = [line for text in (table.head(), table.row(long), table.row(failed)) for line in text.splitlines()]
        assert max(map(len, lines)) <= limit and "2,250,000" in " ".join(lines)
    assert table.row(row(10.0)).split()[:4] == ["bs1", "nanovllm", "custom", "10.0"] and "TTFT p99" in wide.head()


def test_the_reason_of_a_failure_stands_once_below_the_table():
    rows = [row(1.0), *(row(1, engine="sglang", variant="", workload=w, error="no module") for w in ("bs1", "bs8"))]
    assert result_tables.error_lines(rows) == ["not measured: sglang, bs1, bs8: no module"]


def test_tables_go_between_the_markers(tmp_path):
    results.keep(record(row(1000.0), row(500.0, engine="vllm", variant="")), tmp_path)
    text = result_tables.markdown(results.kept_files(tmp_path))
    assert "**NVIDIA H200**" in text and "| bs1: 1 x 2 -> 3 | m | nanovllm custom | 1,000 |" in text
    document = tmp_path / "d.md"
    document.write_text(f"before\n{result_tables.BEGIN}\nold\n{result_tables.END}\nafter\n")
    for _ in range(2):  # the second time changes nothing
        result_tables.write_between_markers(document, text)
        assert document.read_text() == f"before\n{result_tables.BEGIN}\n\n{text}\n{result_tables.END}\nafter\n"
    document.write_text("no markers")
    with pytest.raises(ValueError, match="has no lines <!-- bench:begin -->"):
        result_tables.write_between_markers(document, text)


def test_a_record_knows_its_commit(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for name in ("code.py", "results/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    made = results.new_record(tmp_path, {})
    assert len(made.commit) == 10 and not made.dirty and set(made.versions) == {"torch", "triton", "cuda"}
    (tmp_path / "results/a.json").write_text("2")
    assert not results.new_record(tmp_path, {}).dirty
    (tmp_path / "code.py").write_text("2")
    assert results.new_record(tmp_path, {}).dirty
    assert json.loads(json.dumps(made.to_json()))["schema"] == 1


def test_a_check_compares_a_product_with_itself_though_its_chip_shares_a_folder(tmp_path):
    def on(device, rate):
        made = record(row(rate))
        made.rates = dataclasses.replace(RATES, device=device)
        return made

    results.keep(on("NVIDIA H100 80GB HBM3", 100.0), tmp_path)
    results.keep(on("NVIDIA H100 SXM5 94GB", 10.0), tmp_path)
    assert [path.parent.name for path in results.kept_files(tmp_path)] == ["nvidia-h100"]
    (held,) = results.check(on("NVIDIA H100 80GB HBM3", 99.0), tmp_path)
    assert held.holds and held.kept > 5 * results.check(on("NVIDIA H100 SXM5 94GB", 9.9), tmp_path)[0].kept
    assert not results.check(on("NVIDIA H100 NVL", 99.0), tmp_path)
