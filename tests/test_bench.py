"""`bench.py` as a user runs it, on a tiny model and a CPU."""

import functools
import importlib.util
import json
import re
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest
import torch

import bench
from nanovllm import LLM
from nanovllm.bench import benchmark
from nanovllm.bench.launcher import WorkerDied, in_process
from nanovllm.bench.workloads import Workload
from nanovllm.hardware import measured_rates
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.registry import temporary
from nanovllm.models.model_presets import PRESETS
from tests.providers import registered

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def rates_here():
    return measured_rates.measure(torch.device("cpu"), ("float32", "bfloat16"))


def here(job):
    """This machine's rates, measured once for all tests that run bench.py within this process."""
    return rates_here()


def fake_rates(*several):
    """The device measures as (bandwidth, matmul rate), one after the other."""
    left = list(several)

    def measure(job):
        bandwidth, matmul = left.pop(0) if len(left) > 1 else left[0]
        return measured_rates.Rates("cpu, fake", bandwidth, bandwidth, bandwidth, {"float32": matmul})

    return measure


@pytest.fixture
def run(tiny_qwen3, tmp_path, capfd):
    """bench.py within this process: (exit code, standard output, the JSON record)."""

    def call(*arguments, profile=False, rates=here, around=lambda launch: launch):
        path = tmp_path / "out.json"
        common = ["--model", str(tiny_qwen3), "--device", "cpu", "--json", str(path)]
        common += ["--results", str(tmp_path / "results"), "--profile" if profile else "--no-profile"]
        code = bench.main([*common, *arguments], around(in_process(LLM, rates)))
        record = json.loads(path.read_text()) if path.exists() else None
        return code, capfd.readouterr().out, record

    return call


SMALL = ("--num-requests", "3", "--input-len", "4-9", "--output-len", "5", "--repeat", "2")
NO_CPU_KERNELS = "*=native"


def test_a_run_counts_what_it_should(run):
    code, out, record = run(*SMALL)
    assert code == 0
    (row,) = record["rows"]
    named = [row[k] for k in ("engine", "variant", "workload", "load")]
    assert named == ["nanovllm", "custom", "own-load", "3 x 4-9 -> 5"]
    assert len(row["repeats"]) == 2 and len(row["warmup_seconds"]) == 1
    assert [r["output_tokens"] for r in row["repeats"]] == [15, 15]
    prompts = [sum(len(i.prompt) for i in Workload("own-load", 3, (4, 9), 5).draw(s, 199)) for s in (0, 1)]
    assert [r["total_tokens"] - 15 for r in row["repeats"]] == prompts
    for r in row["repeats"]:
        assert 0 < r["ttft_p50"] <= r["ttft_p99"] <= r["seconds"] and 0 < r["itl_p50"] <= r["itl_p99"] < r["seconds"]
    assert 0 < row["mbu"] < 1 and 0 < row["mfu"] < 1
    assert row["about"]["kernels"]["embedding"] == "native" and row["about"]["dtype"] == "float32"
    assert record["rates"]["bandwidth"] > 1e8 and record["rates"]["matmul"]["float32"] > 1e8
    assert set(record["versions"]) == {"torch", "triton", "cuda"} and record["arguments"]["repeat"] == 2
    assert re.search(r"own-load +nanovllm custom +[\d,.]+ ", out)


def test_each_round_starts_every_engine_anew(run):
    started = []

    def around(launch):
        def counted(job, emit):
            if job.task == "measure":
                started.append((job.engine, job.seed))
            launch(job, emit)

        return counted

    _, out, record = run(
        *SMALL, "--engine", "nanovllm,transformers", "--rounds", "2", "--dtype", "float32", around=around
    )
    assert started == [("nanovllm", 0), ("transformers", 0), ("nanovllm", 2), ("transformers", 2)]
    assert [[r["round"] for r in row["repeats"]] for row in record["rows"]] == [[0, 0, 1, 1]] * 2
    assert re.search(r"nanovllm is [\d.]+x transformers [\d.]+ \([\d.]+ to [\d.]+ in 2 rounds\)", out)


def test_requests_that_arrive_over_time(run):
    load = "--num-requests 5 --input-len 6 --output-len 4 --rate 40 --repeat 1 --warmup 0"
    code, out, record = run(*load.split(), "--wide")
    (row,) = record["rows"]
    assert code == 0 and row["open_loop"] and row["mbu"] is None
    (r,) = row["repeats"]
    last = Workload("custom", 5, 6, 4, rate=40.0).draw(0, 199)[-1].arrival
    assert r["output_tokens"] == 20 and r["seconds"] >= last and r["itl_p99"] > 0 and r["ttft_p50"] > 0
    head, line = out.splitlines()[2:4]
    for name, value in (("TTFT p99", r["ttft_p99"]), ("ITL p99", r["itl_p99"])):
        assert line[: head.index(name) + len(name)].split()[-1] == f"{1e3 * value:,.2f}"


def test_on_and_off_and_the_price_of_each_op(run):
    """With a custom kernel for one op. What is printed are the ratios of the rates that were measured."""
    op = all_ops()["rms_norm"]
    calls = []

    def slow(x, weight, eps):
        calls.append(time.sleep(0.03))
        return op.native(x, weight, eps)

    with registered("rms_norm", slow, "slow"):
        code, out, record = run(*SMALL, "--compare", "--ablate", "--kernels", f"rms_norm=slow;{NO_CPU_KERNELS}")
    assert code == 0 and calls
    assert [r["variant"] for r in record["rows"]] == ["custom", "native", "no rms_norm"]
    assert record["rows"][0]["about"]["kernels"]["rms_norm"] == "slow"
    assert record["rows"][2]["about"]["kernels"]["rms_norm"] == "native"
    ratio = float(re.search(r"custom kernels are ([\d.]+)x native", out)[1])
    worth = float(re.search(r"rms_norm's custom kernel is worth ([-+][\d.]+)%", out)[1])
    custom, native, without = (
        median(r["output_tokens"] / r["seconds"] for r in row["repeats"]) for row in record["rows"]
    )
    assert ratio == pytest.approx(custom / native, abs=0.006)
    assert worth == pytest.approx(100 * (custom / without - 1), abs=0.06)


def test_without_custom_kernels_there_is_nothing_to_compare_or_ablate(run):
    code, out, record = run(*SMALL, "--compare", "--ablate", "--kernels", NO_CPU_KERNELS)
    assert code == 0 and [r["variant"] for r in record["rows"]] == ["custom", "native"]
    assert "own-load: both rows ran the reference, since no custom kernel ran on cpu" in out
    assert "nanovllm default" in out and "nanovllm native" in out and "nanovllm custom" not in out
    assert "no op of this model has a custom kernel here" in out


PLUGIN = """
from nanovllm.kernels import silu_and_mul

@silu_and_mul.provider("mine")
def mine(gate_up):
    return silu_and_mul.native(gate_up)
"""


def test_a_plugin_is_measured_beside_the_engine_without_it(run, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    with temporary():
        code, out, record = run(*SMALL, "--kernel-plugin", str(tmp_path / "mine.py"))
    assert code == 0 and [row["variant"] for row in record["rows"]] == ["custom", "plugin"]
    assert [row["about"]["kernels"]["silu_and_mul"] for row in record["rows"]] == ["native", "mine"]
    assert re.search(r"nanovllm with the plugin is [\d.]+x nanovllm without", out)
    with temporary():
        given = ("--kernel-plugin", str(tmp_path / "mine.py"), "--kernels", "silu_and_mul=native")
        code, out, record = run(*SMALL, *given)
    assert code == 1 and record["rows"][0]["error"] is None
    assert f"`nanovllm kernels list --kernel-plugin {tmp_path / 'mine.py'}` says why" in record["rows"][1]["error"]


def test_peers(run):
    code, out, record = run(*SMALL, "--engine", "nanovllm,transformers,vllm", "--dtype", "float32")
    ours, theirs, vllm = record["rows"]
    assert code == int(vllm["error"] is not None) and ours["error"] is None and theirs["error"] is None
    assert [r["output_tokens"] for r in theirs["repeats"]] == [15, 15] and theirs["repeats"][0]["ttft_p50"] > 0
    assert theirs["repeats"][0]["bytes"] == ours["repeats"][0]["bytes"] and theirs["mbu"] > 0
    assert re.search(r"nanovllm is [\d.]+x transformers \d", out)
    if importlib.util.find_spec("vllm") is None:
        assert vllm["error"] == "vllm is not installed; pip install vllm" and vllm["error"] in out


@pytest.mark.slow
def test_a_peer_reads_the_embedded_model(run, smollm2_path):
    code, _, record = run("--model", str(smollm2_path), *SMALL[:-1], "1", "--engine", "nanovllm,transformers")
    ours, theirs = record["rows"]
    assert code == 0 and theirs["error"] is None and theirs["about"]["dtype"] == ours["about"]["dtype"] == "float32"
    # A peer is counted by the file's mean bytes of a weight, the engine by those of the weights that a step reads.
    assert theirs["repeats"][0]["bytes"] == pytest.approx(ours["repeats"][0]["bytes"], rel=0.03)


@pytest.mark.slow
def test_a_preset_needs_no_files_and_its_dtype_has_a_measured_limit(tmp_path):
    given = "--preset qwen3-0.6b --device cpu --no-profile --engine nanovllm,transformers --json"
    args = bench.parser().parse_args([*given.split(), str(tmp_path / "j.json"), *SMALL])
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    args.preset_config = {**PRESETS["qwen3-0.6b"], **sizes}
    assert benchmark.Benchmark(args, in_process(LLM, here), ROOT).run() == 0
    record = json.loads((tmp_path / "j.json").read_text())
    ours, theirs = record["rows"]
    assert ours["model"] == "qwen3-0.6b" and ours["error"] is None and theirs["error"] is None
    assert ours["about"]["dtype"] == "bfloat16" and record["rates"]["matmul"]["bfloat16"] > 1e8 and ours["mfu"] > 0


def test_a_status_line_says_that_rates_are_measured(run, monkeypatch):
    shown = []

    class Recorder(benchmark.StatusLine):
        def show(self, text, timed=False):
            shown.append((text, timed))

    monkeypatch.setattr(benchmark, "StatusLine", Recorder)
    assert run(*SMALL)[0] == 0
    assert ("starting nanovllm ...", True) in shown and ("loading nanovllm ...", True) in shown
    runs = ["warm-up 1 of 1", "run 1 of 2", "run 2 of 2"]
    said = [(f"own-load, custom: {text} ...", True) for text in runs]
    assert [text for text in shown if "own-load, " in text[0]] == said
    assert shown[0] == shown[-1] == ("measuring the device's rates ...", True) and len(shown) > 2


@pytest.mark.parametrize("engines", ["nanovllm", "nanovllm,transformers"])  # without a row, and after one
def test_an_error_does_not_stand_beside_a_status_line(run, monkeypatch, engines):
    shown = []

    class Recorder(benchmark.StatusLine):
        def show(self, text, timed=False):
            shown.append(text)

        def clear(self):
            shown.append("")

    def around(launch):
        def fails(job, emit):
            if job.task == "measure" and job.engine == engines.split(",")[-1]:
                raise RuntimeError("out of order")
            launch(job, emit)

        return fails

    monkeypatch.setattr(benchmark, "StatusLine", Recorder)
    try:
        code = run(*SMALL, "--engine", engines, "--dtype", "float32", around=around)[0]
    except RuntimeError:
        code = 1
    assert code == 1 and shown[-1] == "" and f"starting {engines.split(',')[-1]} ..." in shown[-3:]


def test_rates_are_measured_before_and_after_and_the_larger_count(run):
    code, out, record = run(*SMALL, rates=fake_rates((1.0, 1e12), (1e18, 1.02e12)))
    assert code == 0 and record["rates"]["bandwidth"] == 1e18 and record["rates"]["matmul"] == {"float32": 1.02e12}
    assert 0 < record["rows"][0]["mbu"] < 1e-6 and "which cannot be" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("measured again")]
    assert "1e+09 GB/s (before 1e-09)" in line and "TFLOP/s" not in line  # 2 % are noise
    assert line.endswith("the table above uses the first values, saved results the larger")


def test_rates_and_engines_have_processes_of_their_own(run):
    """What measures the device has ended, and its memory with it, before an engine sizes its cache by what is free."""
    jobs = []

    def around(inner):
        def launch(job, emit):
            jobs.append(job.task)
            if job.task == "profile":
                raise WorkerDied("not needed here")
            inner(job, emit)

        return launch

    code, out, _ = run("--workload", "tiny", "--repeat", "1", profile=True, around=around)
    assert code == 0 and jobs == ["rates", "measure", "rates", "profile"] and "no profile: not needed here" in out


def test_what_was_measured_outlives_what_fails_after_it(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # so that $TMPDIR is looked at again

    def blocking(inner):
        def launch(job, emit):
            if job.task == "measure":  # a file where the results of this device are to go
                (tmp_path / "results" / "cpu-fake").write_text("")
            if job.task == "profile":
                raise OSError("disk full")
            inner(job, emit)

        return launch

    rates = fake_rates((1e12, 1e12))
    options = "--save", "--profile-dir", str(tmp_path / "p")
    code, out, record = run(*SMALL, *options, profile=True, rates=rates, around=blocking)
    assert code == 1 and record["rows"][0]["error"] is None and "no profile: disk full" in out
    (rescued,) = tmp_path.glob("bench-*.json")
    assert f"written: {rescued}" in out and json.loads(rescued.read_text())["rows"] == record["rows"]

    def breaking(inner):
        def launch(job, emit):
            inner(job, emit)
            if job.task == "measure":
                raise OSError("the terminal is gone")

        return launch

    (tmp_path / "out.json").unlink()
    code, out, record = run(*SMALL, around=breaking)
    assert code == 1 and record["rows"][0]["error"] is None


def test_a_time_limit_for_each_row(run):
    code, _, record = run(*SMALL, "--limit", "0.0001")
    assert code == 1 and record["rows"][0]["error"] == "stopped after 0.0001 s (--limit)"


def test_results_are_kept_shown_and_checked(run, tmp_path, capfd):
    assert run(*SMALL, "--check")[0] == 1  # nothing to compare with yet
    code, out, _ = run(*SMALL, "--save")
    (kept,) = (tmp_path / "results").glob("*/own-load.json")
    assert code == 0 and f"kept: {kept}" in out
    code, out, _ = run("--history")
    assert code == 0 and re.search(r"tiny-qwen3, nanovllm custom\n +[\d-]+ ", out)
    document = tmp_path / "doc.md"
    document.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    assert run("--tables", str(document))[0] == 0 and "| own-load: 3 x 4-9 -> 5 | tiny-qwen3 |" in document.read_text()
    # Another cache is not compared with this one.
    assert run(*SMALL, "--kv-cache-dtype", "fp8")[2]["rows"][0]["model"] == "tiny-qwen3, fp8 cache"
    # A kept share that this machine cannot reach is a regression; one that it can is none.
    runs = json.loads(kept.read_text())
    for share, expected in ((0.999, 1), (1e-9, 0)):
        runs[0]["rows"][0]["mbu"] = runs[0]["rows"][0]["mfu"] = share
        kept.write_text(json.dumps(runs))
        code, out, _ = run(*SMALL, "--check")
        assert code == expected and ("FELL own-load: share of the limit" in out) == bool(expected)


def test_json_on_standard_output_comes_alone(tiny_qwen3, capfd):
    arguments = ["--model", str(tiny_qwen3), "--device", "cpu", "--no-profile", *SMALL, "--json", "-"]
    assert bench.main(arguments, in_process(LLM, here)) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["rows"][0]["error"] is None and "nanovllm custom" in printed.err


def test_what_the_engine_refuses_is_a_row_and_the_exit_code_1(run):
    code, out, record = run(*SMALL, "--compare", "--kernels", "rms_norm=triton")
    refused, native = record["rows"]
    assert code == 1 and native["error"] is None and "triton" in refused["error"]
    assert refused["error"] in " ".join(out.split())
