"""The proof's machinery: what is timed, how choices are judged, the table; and that the plans' launches compute the right thing.

Timing itself needs a GPU (the last test, and `nanovllm plan prove`).
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanovllm.perf.presets import device_model
from nanovllm.perf.tiles import ConvProblem, GemmProblem, measuring, proof, shapes, table
from nanovllm.perf.tiles.launch import num_sets, prepare
from nanovllm.perf.tiles.shapes import ALL, plan

H200 = device_model("h200")
FEW = {"gemm": [GemmProblem(64, 4096, 1024), GemmProblem(1024, 1024, 1024)], "streaming": [ALL["streaming"][0]]}


def test_enough_shapes():
    assert len(shapes.GEMM) >= 30 and len(shapes.ATTENTION) >= 10 and len(shapes.STREAMING) >= 10
    for kind, problems in ALL.items():
        assert len(set(problems)) == len(problems)
        for problem in problems:
            assert plan(problem, H200), kind
    assert num_sets(10e6, 60 << 20) == 14 and num_sets(1e9, 60 << 20) == 2


def test_sample():
    plans = plan(FEW["gemm"][0], H200)
    assert measuring.sample(plans, 0) == list(range(len(plans)))
    some = measuring.sample(plans, 40)
    assert (
        len(some) == len(set(some)) == 40
        and some[:20] == list(range(20))
        and some[-1] < len(plans)
        and some[-1] > 0.9 * len(plans)
    )
    assert measuring.sample(plans[:7], 40) == list(range(7))


def test_judge():
    plans = plan(FEW["gemm"][0], H200)
    found = proof.judge(plans, {0: 2e-6, 1: 3e-6, 2: 2e-6, 3: 2e-6, 4: 1.9e-6, 30: 1e-6})
    assert found["share"] == 0.5 and not found["best_in_first_five"] and found["best"]["rank"] == 30
    assert found["first_five_share"] == pytest.approx(1 / 1.9) and found["first"]["us"] == pytest.approx(2.0)
    # The first choice did not run: the next one stands for it, and five are still counted.
    found = proof.judge(plans, {1: 2e-6, 2: 3e-6, 3: 3e-6, 4: 3e-6, 5: 1e-6, 6: 0.5e-6})
    assert found["first"]["rank"] == 1 and found["share"] == 0.25 and found["first_five_share"] == 0.5


def noisy(seed=0, spread=0.1):
    chance = random.Random(seed)

    def timer(problem, plans, deadline):
        return {
            "seconds": {i: p.seconds * chance.uniform(1 - spread, 1 + spread) for i, p in enumerate(plans)},
            "failed": [],
            "wrong": [],
        }

    return timer


def documented(found, most=0):
    return {"schema": 1, "gpu": "a test", "versions": {"torch": "2"}, "most": most, "date": "2026-01-01", **found}


def test_prove_with_a_timer_that_nearly_agrees():
    found = proof.prove(H200, FEW, noisy(), 60)
    assert (
        [s["kind"] for s in found["shapes"]].count("gemm") == 2 and not found["not_measured"] and not found["stopped"]
    )
    for s in found["shapes"]:
        assert 0.7 < s["share"] <= 1 and s["timed"] == s["candidates"] > 10
    total = found["summary"]["gemm"]
    assert (
        total["shapes"] == 2
        and total["worst_share"] <= total["median_share"]
        and total["median_prediction_error"] <= 0.1
    )
    exact = proof.prove(H200, FEW, noisy(spread=0.0), 60)["summary"]
    # Ranks within half a percent go by other merits than time.
    assert all(s["worst_share"] > 0.99 and s["median_prediction_error"] < 1e-9 for s in exact.values())


def test_what_is_not_reached_is_named():
    found = proof.prove(H200, FEW, noisy(), 0)
    assert not found["shapes"] and len(found["not_measured"]) == 3 and found["summary"] == {}

    def cut(problem, plans, deadline):
        return {"seconds": {0: 1.0}, "cut": True}

    assert len(proof.prove(H200, FEW, cut, 60)["not_measured"]) == 3


def test_a_broken_context_keeps_what_was_measured():
    calls = []

    def breaks(problem, plans, deadline):
        calls.append(problem)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access\nmore")
        return noisy()(problem, plans, deadline)

    found = proof.prove(H200, FEW, breaks, 60)
    assert (
        len(found["shapes"]) == 1
        and len(found["not_measured"]) == 2
        and "illegal memory access" in found["stopped"]
        and len(calls) == 2
    )
    assert "The run stopped early" in table.markdown([documented(found)])


def test_an_earlier_run_is_kept():
    first = documented(proof.prove(H200, {"gemm": FEW["gemm"][:1]}, noisy(1), 60))
    second = documented(proof.prove(H200, {"streaming": FEW["streaming"]}, noisy(2), 60))
    both = proof.merged(first, second)
    assert [s["kind"] for s in both["shapes"]] == ["gemm", "streaming"] and set(both["summary"]) == {
        "gemm",
        "streaming",
    }
    again = documented(proof.prove(H200, {"gemm": FEW["gemm"][:1]}, noisy(3), 60))
    assert (
        proof.merged(both, again)["shapes"][0] == again["shapes"][0] and len(proof.merged(both, again)["shapes"]) == 2
    )
    assert (
        proof.merged({**first, "versions": {"torch": "1"}}, second) == second and proof.merged(None, second) == second
    )
    unreached = documented(proof.prove(H200, {"gemm": FEW["gemm"]}, noisy(), 0))
    kept = proof.merged(first, unreached)
    assert len(kept["shapes"]) == 1 and [p["m"] for p in kept["not_measured"]] == [1024]


def test_the_table_of_the_documentation(tmp_path):
    found = json.loads(json.dumps(documented(proof.prove(H200, {k: list(v[:2]) for k, v in ALL.items()}, noisy(), 60))))
    text = table.markdown([found])
    assert (
        "gemm 16 x 4096 x 1024 bfloat16" in text
        and "attention 16 x 1024 of 1024, 32/8 x 128" in text
        and "**a test**" in text
    )
    assert (
        len(
            {
                line.count("|")
                for line in text.splitlines()
                if line.startswith("| gemm 16") or line.startswith("| shape")
            }
        )
        == 1
    )
    path = tmp_path / "planner.md"
    path.write_text(f"before\n\n{table.BEGIN}\n\nold\n\n{table.END}\n\nafter\n")
    table.fill(path, [found])
    table.fill(path, [found])
    assert path.read_text() == f"before\n\n{table.BEGIN}\n\n{text}\n\n{table.END}\n\nafter\n"
    path.write_text("none")
    with pytest.raises(ValueError, match="expected the markers"):
        table.fill(path, [found])
    assert table.markdown([]) == table.NOT_MEASURED


def test_each_kernel_is_compiled_once():
    keys = [(type(p).__name__, x.config) for p, mine in measuring.to_compile(H200, ["streaming"], 0) for x in mine]
    assert 0 < len(keys) < sum(len(plan(p, H200)) for p in ALL["streaming"])


def test_what_cannot_be_launched():
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="^gemm: nanovllm has no kernel for bfloat16 with weights in int4"):
        prepare(GemmProblem(8, 8, 128, weight="int4"), cpu, H200)
    with pytest.raises(ValueError, match="^problem: nanovllm has no kernel for a ConvProblem"):
        prepare(ConvProblem(1, 1, 8, 8, 1), cpu, H200)


def test_the_proof_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="^prove: needs a CUDA device"):
        proof.run(None, None, 10)
    with pytest.raises(ValueError, match="^kinds: expected some of gemm, attention, streaming, not conv"):
        proof.run(None, None, 10, kinds=["conv"])


LAUNCHES = """
import random, torch
from nanovllm.perf.presets import device_model
from nanovllm.perf.tiles import *
from nanovllm.perf.tiles.launch import prepare
from nanovllm.perf.tiles.shapes import plan
random.seed(0)
cpu = torch.device("cpu")
problems = [GemmProblem(70, 96, 128), GemmProblem(33, 50, 70, "float32"), AttentionProblem(2, 24, 300, 4, 2, 64, dtype="float16")]
problems += [ElementwiseProblem(5000, i) for i in (1, 2, 3)]
problems += [ReductionProblem(k, 7, n, "float32") for k in ("softmax", "layer_norm", "rms_norm") for n in (1000, 3000)]
for p in problems:
    for model in (device_model("h100"), device_model("a100")):
        inputs = prepare(p, cpu, model, sets=1)
        expected = inputs.reference(inputs.sets[0])
        for x in random.sample(plan(p, model), 2):
            error = (inputs.run(x, inputs.sets[0]).float() - expected).abs().max() / expected.abs().max()
            assert error < 0.01, (p, x.config, error)
print("right")
"""


def test_launches_compute_what_they_should():
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.stdout.strip().endswith("right"), done.stderr[-2000:]


@pytest.mark.gpu
def test_timing_on_a_gpu():
    from nanovllm.perf.presets import this_device

    model = this_device(torch.device("cuda", torch.cuda.current_device()))
    problems = {
        "gemm": [GemmProblem(256, 4096, 1024), GemmProblem(300, 1000, 2000)],
        "streaming": [ALL["streaming"][0], ALL["streaming"][7]],
    }
    problems["attention"] = [ALL["attention"][5]]
    with torch.inference_mode():
        found = proof.prove(model, problems, measuring.GpuTimer(model), 300, most=8)
    assert len(found["shapes"]) == 5 and not found["stopped"]
    for s in found["shapes"]:
        assert not s["wrong"] and len(s["failed"]) <= 2, s
        assert 0.2 < s["first"]["predicted_us"] / s["first"]["us"] < 3, s
    started = time.monotonic()
    assert not proof.prove(model, problems, measuring.GpuTimer(model), 0)["shapes"] and time.monotonic() - started < 5


def test_the_documentation_shows_what_was_measured():
    """docs/planner.md holds the table of results/*/planner.json, or says that there is none."""
    root = Path(__file__).resolve().parents[2]
    documents = [json.loads(path.read_text()) for path in sorted(root.glob("results/*/planner.json"))]
    shown = (root / "docs" / "planner.md").read_text().split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.markdown(documents)
