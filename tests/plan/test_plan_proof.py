"""The proof's machinery: what is timed, how choices are judged, the table; and that the plans' launches compute the right thing.

Timing itself needs a GPU (the last test, and `nanovllm plan prove`).
"""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import (
    ConvProblem,
    GemmProblem,
    ReductionProblem,
    ReductionTile,
    docs_table,
    judging,
    measuring,
    proof,
    shapes,
)
from nanovllm.plan.builtin import builtin, with_builtin
from nanovllm.plan.compile_queue import kernels_of
from nanovllm.plan.launch import num_sets, prepare
from nanovllm.plan.shapes import ALL, plan

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
    found = judging.judge(plans, {0: 2e-6, 1: 3e-6, 2: 2e-6, 3: 2e-6, 4: 1.9e-6, 30: 1e-6})
    assert found["share"] == 0.5 and not found["best_in_first_five"] and found["best"]["rank"] == 30
    assert found["first_five_share"] == pytest.approx(1 / 1.9) and found["first"]["us"] == pytest.approx(2.0)
    # The first choice did not run: the next one stands for it, and five are still counted.
    found = judging.judge(plans, {1: 2e-6, 2: 3e-6, 3: 3e-6, 4: 3e-6, 5: 1e-6, 6: 0.5e-6})
    assert found["first"]["rank"] == 1 and found["share"] == 0.25 and found["first_five_share"] == 0.5


def test_the_best_of_what_is_planned():
    """Within the noise the first five need not contain the very best; a kernel that the planner does not know is not asked of them."""
    plans = plan(FEW["gemm"][0], H200)[:10]
    slow = dict.fromkeys(range(9), 2e-6)
    found = judging.judge(plans, {**slow, 3: 1.009e-6, 7: 1e-6})
    assert (
        found["best_in_first_five"] and found["near_rank"] == 3 and found["best"]["rank"] == 7 and found["share"] == 0.5
    )
    found = judging.judge(plans, {**slow, 3: 1.011e-6, 7: 1e-6})
    assert not found["best_in_first_five"] and found["near_rank"] == 7
    # The engine's own kernel, which is not planned, is twice as fast: the first choice is held against it, the first five are not.
    found = judging.judge(plans, {**slow, 9: 1e-6}, own=9, kept=9)
    assert found["share"] == 0.5 == found["first_five_share"] and found["best"]["rank"] == 9
    assert found["best_in_first_five"] and found["near_rank"] == 0
    # Fewer plans than five do not make it one of the first five.
    assert not judging.judge(plans, {0: 2e-6, 1: 1e-6}, own=1, kept=1)["near_rank"]


def test_the_summary_of_all_shapes():
    found = proof.prove(H200, FEW, noisy(), 60)
    kinds, total = found["summary"], found["summary"]["all"]
    assert list(kinds) == ["gemm", "streaming", "all"] and total["shapes"] == 3
    assert total["timed"] == kinds["gemm"]["timed"] + kinds["streaming"]["timed"]
    assert total["worst_share"] == min(kinds["gemm"]["worst_share"], kinds["streaming"]["worst_share"])
    assert total["median_share"] == sorted(s["share"] for s in found["shapes"])[1]
    text = docs_table.markdown([documented(found)])
    assert "| all | 3 |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith(("| all", "| kind", "| gemm |"))}) == 1
    # Held against everything, built-in kernels included, the first five do no better.
    shapes = [{**s, "first_five_share": 0.5} if s["kind"] == "gemm" else s for s in found["shapes"]]
    strict = judging.summary(shapes)
    assert strict["gemm"]["best_of_all_in_first_five"] == 0 and strict["gemm"]["best_in_first_five"] == total_of(
        shapes, "gemm"
    )


def total_of(shapes, kind):
    mine = [s["best_in_first_five"] for s in shapes if s["kind"] == kind]
    return sum(mine) / len(mine)


def noisy(seed=0, spread=0.1):
    chance = random.Random(seed)

    def timer(problem, plans, deadline, own=None):
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
        assert 0.7 < s["share"] <= 1 and s["timed"] - s["candidates"] in (0, 1) and s["candidates"] > 10
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

    def cut(problem, plans, deadline, own=None):
        return {"seconds": {0: 1.0}, "cut": True}

    assert len(proof.prove(H200, FEW, cut, 60)["not_measured"]) == 3


def test_an_error_of_one_shape_does_not_cost_the_others(monkeypatch):
    def planned(problem, model):
        if problem == FEW["gemm"][0]:
            raise KeyError("no such tile")
        return plan(problem, model)

    class Failing(Compiled):
        def ask(self, problem, plans, model):
            if problem == FEW["streaming"][0]:
                raise AttributeError("no such kernel\nmore")
            super().ask(problem, plans, model)

    monkeypatch.setattr(proof, "plan", planned)
    found = proof.prove(H200, FEW, noisy(), 60, ahead=Failing())
    assert [s["problem"]["m"] for s in found["shapes"]] == [1024] and len(found["not_measured"]) == 2
    assert [e["reason"] for e in found["errors"]] == ["KeyError: 'no such tile'", "AttributeError: no such kernel"]
    text = docs_table.markdown([documented(found)])
    assert (
        "Could not be tried: gemm 64 x 4096 x 1024 bfloat16 (KeyError: 'no such tile'); elementwise 2,097,152" in text
    )

    def full(problem, plans, deadline, own=None):
        if problem == FEW["gemm"][1]:
            raise torch.OutOfMemoryError("too large")
        return noisy()(problem, plans, deadline)

    found = proof.prove(H200, {"gemm": FEW["gemm"][1:], "streaming": FEW["streaming"]}, full, 60)
    assert len(found["shapes"]) == 1 and not found["stopped"] and "too large" in found["errors"][0]["reason"]


def test_the_engines_own_plan_is_among_the_candidates():
    for problems in ALL.values():
        for problem in problems:
            plans = plan(problem, H200)
            more, own = with_builtin(plans, problem, H200)
            assert more[: len(plans)] == plans and own is not None and len(more) - len(plans) in (0, 1)
            assert own == len(plans) or more == plans
            assert kernels_of(problem, [more[own]], H200) != [()]
    tiles = {p: builtin(p, H200).config for p in (*shapes.GEMM, *shapes.ATTENTION, *shapes.STREAMING)}
    by_size = {(p.m, p.n, p.k): str(tile) for p, tile in tiles.items() if isinstance(p, GemmProblem)}
    assert (
        by_size[8192, 6144, 4096] == "128x256x64 w8 s3 tma group 16"
        and by_size[256, 1024, 3072] == "64x64x128 w4 s6 split 2 tma"
    )
    assert by_size[16, 4096, 1024] == "stream 16x64x128 w4 s4" and by_size[1, 4096, 4096] == "stream 1x4x2048 w8 s1"
    assert (
        str(tiles[shapes.ATTENTION[0]]) == "128x128 w8 s2" and str(tiles[shapes.STREAMING[0]]) == "1024 w4 (8 a thread)"
    )
    assert (
        builtin(ConvProblem(1, 1, 8, 8, 1), H200) is None
        and builtin(GemmProblem(8, 8, 128, weight="int4"), H200) is None
    )


def test_the_engines_kernel_of_blocks_is_planned():
    """LayerNorm of a long row that is no power of two: three times 4096, not 16384."""
    problem = ALL["streaming"][-1]
    assert problem == ReductionProblem("layer_norm", 4096, 12288)
    plans = plan(problem, H200)
    assert builtin(problem, H200).config == plans[0].config == ReductionTile(1, 2048, 8, held=6)
    assert with_builtin(plans, problem, H200) == (plans, 0)


def test_the_best_may_be_the_engines_own(monkeypatch):
    problem = GemmProblem(16, 4096, 1024)  # of the kernel for few rows, which is not planned
    kept = len(plan(problem, H200))

    def timer(problem, plans, deadline, own):
        assert own == len(plans) - 1 == kept
        return {
            "seconds": {i: (1e-6 if i == own else p.seconds) for i, p in enumerate(plans)},
            "failed": [],
            "wrong": [],
        }

    found = json.loads(json.dumps(proof.prove(H200, {"gemm": [problem]}, timer, 60)))
    (shape,) = found["shapes"]
    assert (
        shape["best"]["rank"] == kept == shape["candidates"] and shape["builtin"]["us"] == 1.0 and shape["share"] < 0.5
    )
    assert "| 1.0 | built in, not kept |" in docs_table.markdown([documented(found)])

    def only_own(problem, plans, deadline, own):
        return {"seconds": {own: 1e-6}, "failed": [], "wrong": []}

    assert len(proof.prove(H200, {"gemm": [problem]}, only_own, 60)["not_measured"]) == 1


def test_tables_are_filled_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    docs = tmp_path / "planner.md"
    docs.write_text(f"{docs_table.BEGIN}{docs_table.END}")
    with pytest.raises(ValueError, match="--tables: expected --docs"):
        proof.main(["--tables"])
    with pytest.raises(ValueError, match="--tables: there is no results/<gpu>/planner.json"):
        proof.main(["--tables", "--docs", str(docs)])
    for gpu in ("one", "two"):
        path = tmp_path / "results" / gpu / "planner.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**documented(proof.prove(H200, FEW, noisy(), 60)), "gpu": gpu}))
    proof.main(["--tables", "--docs", str(docs)])
    assert "**one**" in docs.read_text() and "**two**" in docs.read_text() and "results/two" in capsys.readouterr().out
    elsewhere = tmp_path / "a" / "kept.json"
    elsewhere.parent.mkdir()
    elsewhere.write_text((tmp_path / "results" / "two" / "planner.json").read_text())
    proof.main(["--tables", "--docs", str(docs), "--out", str(elsewhere)])
    assert "**one**" not in docs.read_text() and "**two**" in docs.read_text()
    for bad in ("{", "[]", "{}"):
        elsewhere.write_text(bad)
        with pytest.raises(ValueError, match="kept.json: not a file of `nanovllm plan prove`"):
            proof.main(["--tables", "--docs", str(docs), "--out", str(elsewhere)])
    assert "**two**" in docs.read_text()


def test_the_library_multiplies_in_the_dtype_of_the_problem(monkeypatch):
    from nanovllm.plan import launch

    seen, linear, cpu = [], launch.F.linear, torch.device("cpu")

    def watched(*arguments):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return linear(*arguments)

    monkeypatch.setattr(launch.F, "linear", watched)
    before = torch.backends.cuda.matmul.fp32_precision
    for dtype in ("tfloat32", "float32", "bfloat16"):
        inputs = prepare(GemmProblem(4, 4, 4, dtype), cpu, H200, sets=1)
        inputs.library(inputs.sets[0])
    assert seen == ["tf32", "ieee", before] and torch.backends.cuda.matmul.fp32_precision == before


def test_a_broken_context_keeps_what_was_measured():
    calls = []

    def breaks(problem, plans, deadline, own=None):
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
    assert "The run stopped early" in docs_table.markdown([documented(found)])


def test_an_earlier_run_is_kept():
    first = documented(proof.prove(H200, {"gemm": FEW["gemm"][:1]}, noisy(1), 60))
    second = documented(proof.prove(H200, {"streaming": FEW["streaming"]}, noisy(2), 60))
    both = proof.merged(first, second)
    assert [s["kind"] for s in both["shapes"]] == ["gemm", "streaming"] and set(both["summary"]) == {
        "gemm",
        "streaming",
        "all",
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
    text = docs_table.markdown([found])
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
    path.write_text(f"before\n\n{docs_table.BEGIN}\n\nold\n\n{docs_table.END}\n\nafter\n")
    docs_table.fill(path, [found])
    docs_table.fill(path, [found])
    assert path.read_text() == f"before\n\n{docs_table.BEGIN}\n\n{text}\n\n{docs_table.END}\n\nafter\n"
    path.write_text("none")
    with pytest.raises(ValueError, match="expected the markers"):
        docs_table.fill(path, [found])
    assert docs_table.markdown([]) == docs_table.NOT_MEASURED


class Clock:
    """A bench whose calls are numbers: seconds that they take. Counts what a GPU and a host would spend."""

    CAPTURE, LAUNCH = 3e-4, 6e-5

    def __init__(self, noise=0.0):
        self.spent, self.recorded, self.chance, self.noise = 0.0, 0, random.Random(0), noise

    def once(self, call):
        self.spent += call + self.LAUNCH
        return call + self.LAUNCH

    def record(self, calls):
        self.recorded += 1
        self.spent += self.CAPTURE + len(calls) * self.LAUNCH
        return sum(calls)

    def replays(self, graph, count):
        return self.turns([graph], count)[0]

    def turns(self, graphs, rounds):
        times = [[g * self.chance.uniform(1 - self.noise, 1 + self.noise) for _ in range(rounds)] for g in graphs]
        self.spent += graphs[-1] + sum(map(sum, times))
        return times


@pytest.mark.parametrize("seconds, sets, most", [(5e-6, 18, 4e-3), (30e-6, 4, 5e-3), (600e-6, 2, 15e-3)])
def test_a_glance_costs_little(seconds, sets, most):
    for best in (None, 0.7 * seconds, seconds, 3 * seconds):
        clock = Clock()
        timer = measuring.GpuTimer(H200, bench=clock)
        assert timer.glance([seconds] * sets, seconds, best) == pytest.approx(seconds)
        assert clock.spent < most
    # Far from the best: two calls of a slow kernel, a graph of a fast one.
    clock = Clock()
    slow = measuring.GpuTimer(H200, bench=clock).glance([5 * seconds] * sets, seconds, seconds)
    assert slow > measuring.FAR * seconds and clock.spent < 15e-3
    assert clock.recorded == (seconds < 300e-6)


def test_slow_only_once_is_not_far():
    """The first call loads the kernel."""
    clock = Clock()
    found = measuring.GpuTimer(H200, bench=clock).glance([5e-3, 600e-6], 600e-6, 600e-6)
    assert clock.recorded == 1 and found > 600e-6


def test_the_nearer_the_more_exact():
    def spread(best):
        times = [
            measuring.GpuTimer(H200, bench=clock).glance([20e-6] * 5, 20e-6, best)
            for clock in [Clock(0.1)]
            for _ in range(200)
        ]
        return max(times) / min(times)

    assert spread(20e-6) < spread(10e-6)


def test_finalists_are_compared_in_turns():
    assert measuring.finalists({i: 1.0 / (1 + i) for i in range(20)}) == [0, 1, 2, 3, 4, *range(12, 20)]
    assert measuring.finalists({3: 1.0, 7: 2.0}) == measuring.finalists({3: 1.0, 7: 2.0}, 9) == [3, 7]
    assert measuring.finalists({i: 1.0 + i for i in range(20)}, 15) == [*range(8), 15]
    clock = Clock(0.05)
    found = measuring.GpuTimer(H200, bench=clock).compare([[1e-5] * 6, [2e-5] * 6, [5e-4] * 2])
    assert found == pytest.approx([1e-5, 2e-5, 5e-4], rel=0.05)
    assert measuring.repeats(1e-3, 25, 12e-3, 5) == 12 and measuring.repeats(1e-6, 25, 12e-3, 5) == 25
    assert measuring.repeats(1.0, 25, 12e-3, 5) == 5


def test_the_timer_counts_failures_and_wrong_results(monkeypatch):
    """Everything of `GpuTimer` but the GPU: seconds are the plans' own, some plans fail or compute something else."""
    from contextlib import nullcontext

    from nanovllm.plan import launch

    problem = FEW["gemm"][0]
    plans = plan(problem, H200)[:40]
    right = torch.arange(6.0).reshape(2, 3)
    tried, wrong = [], (plans[2],)

    class Called(Clock):
        def once(self, call):
            call()
            return super().once(call.args[0].seconds)

        def record(self, calls):
            for call in calls:
                call()
            return super().record([3e-6 if call.func is library else call.args[0].seconds for call in calls])

    def run(x, arguments):
        tried.append(x)
        if x is plans[1]:
            raise RuntimeError("out of resource\nmore")
        return right + (x in wrong)

    def library(arguments):
        return right

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(
        launch, "prepare", lambda *_: launch.Inputs([(right,)] * 4, run, lambda arguments: arguments[0], library)
    )
    bench = Called()
    bench.stream = None
    timer = measuring.GpuTimer(H200, lambda p, i: "CompilationError: no" if p is problem and i == 3 else None, bench)
    swift = [replace(p, seconds=1e-9) if i == 20 else p for i, p in enumerate(plans)]
    wrong = (plans[2], swift[20])
    found = timer(problem, swift, time.monotonic() + 60)
    # In the order in which they were compared: those that lead at once, the others as finalists.
    assert 20 not in found["seconds"] and {w["config"] for w in found["wrong"]} == {str(p.config) for p in wrong}
    assert found["seconds"] == pytest.approx({i: plans[i].seconds for i in found["seconds"]})  # it did not set the pace
    own = timer(problem, plans, time.monotonic() + 60, 39)
    assert own["seconds"][39] == pytest.approx(plans[39].seconds)
    wrong, _ = (plans[2],), tried.clear()
    found = timer(problem, plans, time.monotonic() + 60)
    assert found["failed"] == [
        {"config": str(plans[1].config), "reason": "RuntimeError: out of resource"},
        {"config": str(plans[3].config), "reason": "CompilationError: no"},
    ]
    assert tried.count(plans[1]) == 1 and plans[3] not in tried
    # What is wrong, fast or not, is no candidate; what stands in its place is compared too.
    assert set(found["seconds"]) == set(range(40)) - {1, 2, 3} and found["library_us"] == pytest.approx(3.0)
    assert found["seconds"] == pytest.approx({i: plans[i].seconds for i in found["seconds"]})
    assert found["wrong"] == [{"config": str(plans[2].config), "error": pytest.approx(0.2)}]
    assert timer(problem, plans, 0.0) == {"seconds": {}, "cut": True}
    nothing = measuring.GpuTimer(H200, lambda p, i: "no", bench)(problem, plans[:2], time.monotonic() + 60)
    assert not nothing["seconds"] and len(nothing["failed"]) == 2


class Compiled:
    """Stands for `Ahead`: has compiled one problem at once, the others when they are waited for."""

    def __init__(self, never=()):
        self.asked, self.waited, self.never = [], [], never

    def ask(self, problem, plans, model):
        self.asked.append((problem, len(plans)))

    def ready(self, problem):
        return problem in self.waited or problem == FEW["gemm"][1]

    def wait(self, problem, deadline):
        self.waited.append(problem)
        return problem not in self.never


def test_what_is_compiled_is_timed_first(monkeypatch):
    monkeypatch.setattr(proof, "_KEEP_SECONDS", 0.0)
    order, kept = [], []

    def timer(problem, plans, deadline, own=None):
        order.append(problem)
        return noisy()(problem, plans, deadline)

    ahead = Compiled()
    found = proof.prove(H200, FEW, timer, 60, 7, ahead, kept.append)
    # Seven of what the planner keeps, and the built-in one where it is none of these.
    assert ahead.asked == [(FEW["gemm"][0], 8), (FEW["streaming"][0], 7), (FEW["gemm"][1], 8)]
    assert order == [FEW["gemm"][1], FEW["gemm"][0], FEW["streaming"][0]]
    # In the order of the problems whatever the order of the timing, and written as it grows.
    assert [s["problem"]["kind"] for s in found["shapes"]] == ["gemm", "streaming", "gemm"]
    assert [len(k["shapes"]) for k in kept] == [1, 2, 3] and kept[-1] == found
    assert [len(k["not_measured"]) for k in kept] == [2, 1, 0] and kept[0]["summary"]["gemm"]["shapes"] == 1
    late = proof.prove(H200, FEW, timer, 60, 7, Compiled(never=FEW["streaming"]))
    assert len(late["shapes"]) == 2 and [p["kind"] for p in late["not_measured"]] == ["streaming"]


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
import dataclasses, random, torch
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import *
from nanovllm.plan.launch import prepare
from nanovllm.plan.shapes import plan
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
for kind in ("layer_norm", "rms_norm"):
    for rows in (7, 1030):
        p = ReductionProblem(kind, rows, 768, "float16")
        inputs = prepare(p, cpu, device_model("h100"), sets=1)
        (held,) = [x for x in plan(p, device_model("h100")) if x.config.held > 1]
        assert held.config.block * held.config.held == 768
        expected = inputs.reference(inputs.sets[0])
        error = (inputs.run(held, inputs.sets[0]).float() - expected).abs().max() / expected.abs().max()
        assert error < 0.01, (p, held.config, error)
from nanovllm.plan.builtin import OwnKernel, builtin
for p in (GemmProblem(1, 96, 256), GemmProblem(16, 96, 1024), GemmProblem(33, 64, 2048, "float16"), GemmProblem(70, 96, 128), GemmProblem(9, 64, 70, "float32")):
    inputs = prepare(p, cpu, device_model("h100"), sets=1)
    expected = inputs.reference(inputs.sets[0])
    own = builtin(p, device_model("a100"))
    error = (inputs.run(own, inputs.sets[0]).float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01, (p, own.config, error)
for kind in ("layer_norm", "rms_norm", "softmax"):
    inputs = prepare(ReductionProblem(kind, 7, 300, "float32"), cpu, device_model("h100"), sets=1)
    expected = inputs.reference(inputs.sets[0])
    own = dataclasses.replace(builtin(GemmProblem(1, 96, 256), device_model("h100")), config=OwnKernel(kind, 4))
    error = (inputs.run(own, inputs.sets[0]).float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01, (kind, error)
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
def test_timing_on_a_gpu(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from nanovllm.hardware.gpu_presets import this_device
    from nanovllm.plan.compile_queue import Ahead

    model = this_device(torch.device("cuda", torch.cuda.current_device()))
    problems = {
        "gemm": [GemmProblem(256, 4096, 1024), GemmProblem(300, 1000, 2000)],
        "streaming": [ALL["streaming"][0], ALL["streaming"][7]],
    }
    problems["attention"] = [ALL["attention"][5]]
    missed = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, cache_hit, **rest: cache_hit or missed.append(src.name)
    )
    ahead = Ahead(4)
    try:
        with torch.inference_mode():
            found = proof.prove(model, problems, measuring.GpuTimer(model, ahead.failure), 300, 8, ahead)
    finally:
        ahead.close()
    assert len(found["shapes"]) == 5 and not found["stopped"] and not missed
    for s in found["shapes"]:
        assert not s["wrong"] and len(s["failed"]) <= 2, s
        assert 0.2 < s["first"]["predicted_us"] / s["first"]["us"] < 3, s
    started = time.monotonic()
    with torch.inference_mode():
        nothing = proof.prove(model, problems, measuring.GpuTimer(model), 0)
    assert not nothing["shapes"] and time.monotonic() - started < 5


def test_the_documentation_shows_what_was_measured():
    """docs/planner.md holds the table of results/*/planner.json, or says that there is none."""
    root = Path(__file__).resolve().parents[2]
    documents = [json.loads(path.read_text()) for path in sorted(root.glob("results/*/planner.json"))]
    shown = (root / "docs" / "planner.md").read_text().split(docs_table.BEGIN)[1].split(docs_table.END)[0].strip()
    assert shown == docs_table.markdown(documents)


def test_kept_times_judge_another_model(tmp_path, monkeypatch):
    """The ranking is today's, the times are the run's; a shape without times is named."""
    problem, model = ALL["streaming"][0], device_model("h200")
    kind, plans = "streaming", proof.plan(problem, model)
    words = judging.in_words(kind, problem)
    us = {
        str(p.config): 10.0 + i for i, p in enumerate(plans)
    }  # in the order of today's model: its first choice is the best
    shape = {
        "kind": kind,
        "problem": words,
        "candidates": 1,
        "timed": 1,
        "share": 0.1,
        "builtin": None,
        "library_us": 3.0,
        "took_s": 1.0,
    }
    document = {"schema": 3, "device": asdict(model), "shapes": [shape], "summary": {}}
    found = judging.judged_again(document, [{"problem": words, "us": us}])
    (judged,) = found["shapes"]
    assert (
        judged["share"] == 1
        and judged["best_in_first_five"]
        and judged["timed"] == len(plans)
        and judged["library_us"] == 3.0
    )
    assert found["summary"]["all"]["median_share"] == 1
    us[str(plans[7].config)] = 5.0
    (judged,) = judging.judged_again(document, [{"problem": words, "us": us}])["shapes"]
    assert judged["share"] == 0.5 and not judged["best_in_first_five"] and judged["near_rank"] == 7
    with pytest.raises(ValueError, match="no times"):
        judging.judged_again(document, [])
    with pytest.raises(ValueError, match="nothing that is planned today"):
        judging.judged_again(document, [{"problem": words, "us": {"of the past": 1.0}}])
    for name in ("out", "times"):
        (tmp_path / f"{name}.json").write_text("{}")
    with pytest.raises(ValueError, match="not of one run"):
        judging.judge_file(tmp_path / "out.json", tmp_path / "times.json")
    with pytest.raises(ValueError, match="--out"):
        judging.judge_file(tmp_path / "none.json", tmp_path / "times.json")
