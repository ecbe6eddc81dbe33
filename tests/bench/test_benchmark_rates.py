"""Which rates a run of bench.py asks for and shows, with engines that are made up."""

import json
from dataclasses import asdict

import pytest

import bench
from nanovllm.bench import benchmark, measuring_process
from nanovllm.bench.job import Repeat, ResultRow
from nanovllm.hardware.measured_rates import Rates


def run(tmp_path, fp8_flops, *further, dtypes=("bfloat16",), rate=2e12, speeds=(1e12, 1e12), **about):
    """A run whose engine needs 3 seconds for 3e12 flops: (the dtypes that each job of rates was told, the record)."""
    told = []

    def launch(job, emit):
        if job.task == "rates":
            told.append(job.options.get("dtype"))
            speed = speeds[len(told) - 1]
            named = {"bfloat16", *dtypes, *(told[-1:] if told[-1] else ())}
            rates = Rates("GPU, fake", 1e12, 1e12, 1e12, {d: rate if d == "float8" else speed for d in named})
            return emit("rates", asdict(rates))
        repeat = Repeat(3.0, 1, 1, None, None, None, None, 10, int(6e12), 1.6, fp8_flops)
        row = ResultRow("nanovllm", "custom", "m", job.workloads[0].name, "", None, [repeat], [1.0])
        row.about = {"device": "GPU, fake", "dtype": "bfloat16", **about}
        return emit("row", row.to_json())

    path = tmp_path / "j.json"
    given = ["--preset", "qwen3-8b", "--workload", "prefill", "--no-profile", "--json", str(path), *further]
    args = bench.parser().parse_args([*given, "--results", str(tmp_path / "results")])
    assert benchmark.Benchmark(args, launch, tmp_path).run() == 0
    return told, json.loads(path.read_text())


def test_products_of_8_bit_floats_are_no_reason_to_doubt_the_account(tmp_path, capsys):
    told, record = run(tmp_path, int(6e12), dtypes=("bfloat16", "float8"))
    out = capsys.readouterr().out
    assert told == [None, None] and record["rows"][0]["mfu"] == pytest.approx(1.0)
    assert "measured on GPU, fake: 1,000 GB/s, 1 TFLOP/s bfloat16, 2 TFLOP/s float8\n" in out
    assert "impossible" not in out


def test_their_rate_is_measured_afterwards_where_only_the_engine_knew_of_them(tmp_path, capsys):
    told, record = run(tmp_path, int(3e12))
    out = capsys.readouterr().out
    assert told == [None, "float8"] and record["rows"][0]["mfu"] == pytest.approx(1.5)
    assert "measured on GPU, fake: 1,000 GB/s, 1 TFLOP/s bfloat16\n" in out
    assert "measured on GPU, fake: 2 TFLOP/s float8\n" in out and "150.0% with the rates measured again is impo" in out
    assert "is counted wrongly (nanovllm/bench/workload_cost.py)" in out


def test_their_rate_is_not_shown_where_it_is_not_used_or_not_there(tmp_path, capsys):
    told, record = run(tmp_path, 0)
    assert told == [None, None] and "float8" not in capsys.readouterr().out
    assert record["rows"][0]["mfu"] == pytest.approx(2.0)  # all at bfloat16's
    _, record = run(tmp_path, int(6e12), dtypes=("bfloat16", "float8"), rate=0.0)
    out = capsys.readouterr().out
    assert record["rows"][0]["mfu"] is None and "float8" not in out and "impossible" not in out


def test_rates_of_several_devices_include_that_of_8_bit_floats():
    one = Rates("GPU", 1.0, 1.0, 1.0, {"bfloat16": 1.0, "float8": 2.0})
    assert measuring_process.of_several(one, 4).matmul == {"bfloat16": 4.0, "float8": 8.0}


def test_a_row_above_the_limit_names_other_processes_before_the_account(tmp_path, capsys):
    run(tmp_path, 0, speeds=(1e12, 1.6e12), device="cpu")
    out = capsys.readouterr().out
    assert (
        "prefill, nanovllm custom: of limit 200.0% is impossible (125.0% with the rates measured again): other"
        " processes used up to 1.6 processors; run it again on an idle machine\n"
    ) in out
    assert "workload_cost" not in out and "processors meanwhile" not in out
    run(tmp_path, 0, speeds=(1e12, 2e12), device="cpu")
    out = capsys.readouterr().out
    assert "impossible" not in out and "other processes used up to 1.6 processors meanwhile" in out
