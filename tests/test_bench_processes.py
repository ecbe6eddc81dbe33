"""`bench.py` in processes of its own, what it says to bad arguments, and a run on a GPU."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bench
from nanovllm.bench import launcher
from nanovllm.bench.job import Job
from nanovllm.bench.workloads import WORKLOADS
from nanovllm.models.model_presets import PRESETS
from tests.bench.perfetto_reading import check
from tests.shared_gpu import memory_utilization
from tests.test_bench import ROOT


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--workload", "bs9"), "did you mean 'bs8'"),
        (("--engine", "tgi"), "--engine 'tgi': expected any of nanovllm, transformers, vllm"),
        (("--num-requests", "3"), "needs --num-requests, --input-len, --output-len"),
        (("--repeat", "0"), "--repeat and --rounds are at least 1"),
        (("--compare", "--no-use-custom-kernels"), "leave out --use-custom-kernels"),
        (("--workload", "bs1", "--rate", "3"), "choose poisson"),
        (("--kernels", "rms_norm"), "'rms_norm' is not of the form op=provider"),
        (("--kernels", "rmsnorm=native"), "--kernels: unknown op 'rmsnorm'; did you mean 'rms_norm'?"),
        (("--kernels", "rms_norm=trition"), "--kernels names 'trition', but"),
        (("--model", "/nope"), "--model /nope: no such file or directory, and no hub id"),
        (("--model", "nope.gguf"), "--model nope.gguf: no such file or directory"),
        (("--model", "qwen3-0.6b"), "is a preset (a shape without weights): --preset qwen3-0.6b takes"),
        (("--engine", ","), "--engine ',': names nothing; leave it out, or choose any of nanovllm, transformers, vllm"),
        (("--workload", ""), "--workload '': names nothing; leave it out, or choose any of bs1, bs8"),
        (("--preset", "qwen3-0.6b"), "one has weights of its own, the other random ones; leave one"),
        (("--preset", ""), "--preset '': names nothing"),
        (("--limit", "0"), "--limit 0: expected seconds, above 0"),
        (("--device", "tpu"), "--device tpu: expected auto, cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), "--device cuda:99: "),
        (("--engine-path", "vllm=."), "'vllm' is no peer among --engine"),
        (("--engine-path", "nanovllm=."), "'nanovllm' is no peer among --engine"),
        (("--engine", "transformers", "--engine-path", "transformers="), "there is no folder ''"),
        (("--engine", "transformers", "--engine-path", "transformers=./none"), "there is no folder './none'"),
    ],
)
def test_bad_input_is_one_line(tiny_qwen3, capfd, arguments, said):
    assert bench.main(["--model", str(tiny_qwen3), "--device", "cpu", "--in-process", "--no-profile", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("bench.py: ") and said in captured.err and captured.err.count("\n") == 1


@pytest.fixture(scope="module")
def whole_run(tiny_qwen3, tmp_path_factory, warm_python):
    """(the folder of the profile's files, what was printed) of a run in processes of its own."""
    folder = tmp_path_factory.mktemp("whole")
    command = [str(ROOT / "bench.py"), "--model", str(tiny_qwen3), "--device", "cpu",
               "--workload", "tiny", "--repeat", "1", "--kernels", "decoder_step=native;sample=native",
               "--profile-dir", str(folder), "--json", str(folder / "j.json")]  # fmt: skip
    command += ["--plots"] if importlib.util.find_spec("matplotlib") else []
    done = warm_python.run(*command, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_a_whole_run_in_processes_of_its_own(whole_run):
    """The profile's files, too."""
    folder, printed = whole_run
    (row,) = json.loads((folder / "j.json").read_text())["rows"]
    assert row["error"] is None and row["repeats"][0]["output_tokens"] == 64
    assert (folder / "profile_trace.json").stat().st_size < 50e6
    assert set(folder.glob("profile*.*")) <= {Path(name) for name in re.findall("^written: (.+)$", printed, re.M)}
    text = (folder / "profile_report.txt").read_text()
    for part in ("STEPS", "OPS, MOST DEVICE TIME FIRST", "HOST", "MEMORY", "attention_decode", "TFLOP/s"):
        assert part in text
    if importlib.util.find_spec("matplotlib"):
        assert (folder / "profile_report.html").stat().st_size > 20_000
        drawn = {p.name for p in folder.glob("*.png")}
        assert drawn >= {f"profile_{name}.png" for name in ("roofline", "steps", "timeline")}
    else:
        assert "it needs matplotlib" in printed


@pytest.mark.slow
def test_perfetto_reads_the_trace_of_a_whole_run(whole_run):
    read = check(whole_run[0] / "profile_trace.json")
    assert {c.name for c in read.counters} >= {"KV cache blocks used"} and len(read.processes) == 1
    decodes = [read.around(s) for s in read.slices if s.name.startswith("attention_decode [")]
    assert decodes and all(names[0].startswith("layer ") and "LLMEngine.step" in names for names in decodes)


def test_ctrl_c_writes_what_was_measured(tiny_qwen3, tmp_path):
    command = [sys.executable, str(ROOT / "bench.py"), "--model", str(tiny_qwen3), "--device", "cpu",
               "--workload", "tiny,bs128", "--repeat", "3",
               "--no-profile", "--json", str(tmp_path / "j.json")]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        for line in process.stdout:
            if line.startswith("tiny ") and "nanovllm" in line:
                break
        time.sleep(0.5)
        listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
        children = [int(pid) for pid in listed.split()]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in rest and "Traceback" not in errors
    (row,) = json.loads((tmp_path / "j.json").read_text())["rows"]
    assert row["workload"] == "tiny" and len(row["repeats"]) == 3
    assert children
    for child in children:  # nothing is left running
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


FOUR_LAYERS = {**PRESETS["qwen3-0.6b"], "num_hidden_layers": 4}
"""Engines of it, of which a profile takes two, are made sooner than those of 28."""


@pytest.mark.gpu
def test_an_engine_in_a_process_of_its_own_on_a_gpu():
    """Without kernels of ours, which it would compile beside the processes of other tests."""
    options, tiny = {"num_kvcache_blocks": 20, "use_custom_kernels": False}, WORKLOADS["tiny"]
    job = Job("nanovllm", "native", "qwen3-0.6b", (tiny,), FOUR_LAYERS, options, repeat=1)
    rows, said = [], []
    launch = launcher.in_child([sys.executable, str(ROOT / "bench.py")])
    launcher.measure_rows(launch, job, rows.append, lambda kind, content: said.append(kind))
    assert [(row.workload, row.error) for row in rows] == [("tiny", None)] and said == [
        "loading",
        "started",
        "run",
        "run",
    ]
    assert rows[0].about["device"] == torch.cuda.get_device_name()
    assert [repeat.output_tokens for repeat in rows[0].repeats] == [tiny.num_requests * tiny.output_len]


@pytest.mark.gpu
@pytest.mark.alone
def test_shares_of_the_limit_stay_below_all_of_it_on_a_gpu(tmp_path, monkeypatch):
    """In this process: five others would each import PyTorch, start CUDA and load all kernels."""
    monkeypatch.setitem(PRESETS, "qwen3-0.6b", FOUR_LAYERS)
    memory = str(memory_utilization(0.2))
    given = "--in-process --preset qwen3-0.6b --workload bs1,bs128,prefill --repeat 1 --gpu-memory-utilization"
    assert bench.main([*given.split(), memory, "--profile-dir", str(tmp_path), "--json", str(tmp_path / "j")]) == 0
    for row in json.loads((tmp_path / "j").read_text())["rows"]:
        assert row["error"] is None and 0.02 < max(row["mbu"], row["mfu"]) <= 1
    profile = json.loads((tmp_path / "profile.json").read_text())["profile"]
    assert all(o["floor_us"] is None or o["floor_us"] <= o["device_us"] for o in profile["ops"])
