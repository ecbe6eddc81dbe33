"""The planner's proof: how choices are judged, what a run keeps, the table of the documentation. Needs no GPU."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.planner_proof import __main__ as command
from benchmarks.planner_proof import docs_table, judging
from benchmarks.planner_proof.builtin_choice import builtin, with_builtin
from benchmarks.planner_proof.gpu_timer import sample
from benchmarks.planner_proof.input_sets import num_sets, prepare
from benchmarks.planner_proof.problems import ALL, plan
from benchmarks.planner_proof.proof import prove
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import ConvProblem, GemmProblem, ReductionProblem

H200 = device_model("h200")
FEW = {"gemm": [GemmProblem(64, 128, 256), GemmProblem(128, 256, 256)], "streaming": [ALL["streaming"][7]]}


def noisy(spread=0.1):
    """A timer that agrees with the predictions, but for some noise."""
    chance = random.Random(0)

    def timer(problem, plans, deadline, own=None):
        seconds = {i: p.seconds * chance.uniform(1 - spread, 1 + spread) for i, p in enumerate(plans)}
        return {"seconds": seconds, "failed": [], "wrong": []}

    return timer


def measured(problems=FEW, timer=None, limit=60, **options):
    return prove(H200, problems, timer or noisy(), limit, **options).document()


def documented(found, **fields):
    head = {"schema": 1, "gpu": "a test", "versions": {"torch": "2"}, "most": 0, "date": "2026-01-01"}
    return {**head, **found, **fields}


def test_problems_have_plans_and_the_engines_own_choice():
    assert [len(set(problems)) for problems in ALL.values()] == [32, 10, 11]
    for problem in (ALL["gemm"][5], ALL["gemm"][21], ALL["attention"][0], *ALL["streaming"]):
        plans = plan(problem, H200)
        more, own = with_builtin(plans, problem, H200)
        assert plans and more[: len(plans)] == plans and own is not None and len(more) == max(len(plans), own + 1)
    for m, n, k, tile in (
        (8192, 6144, 4096, "128x256x64 w8 s3 tma group 16"), (256, 1024, 3072, "64x64x128 w4 s6 split 2 tma"),
        (16, 4096, 1024, "stream 16x64x128 w4 s4"), (1, 4096, 4096, "stream 1x4x2048 w8 s1"),
    ):  # fmt: skip
        assert str(builtin(GemmProblem(m, n, k), H200).config) == tile
    assert builtin(ConvProblem(1, 1, 8, 8, 1), H200) is builtin(GemmProblem(8, 8, 128, weight="int4"), H200) is None
    # LayerNorm of a long row that is no power of two: three times 4096, not 16384.
    problem = ReductionProblem("layer_norm", 4096, 12288)
    plans = plan(problem, H200)
    assert with_builtin(plans, problem, H200) == (plans, 0) and plans[0].config.held == 6
    assert num_sets(10e6, 60 << 20) == 14 and num_sets(1e9, 60 << 20) == 2


def test_what_cannot_be_launched():
    packed = GemmProblem(8, 8, 128, weight="int4")
    for problem, what in ((packed, "bfloat16 with weights in int4"), (ConvProblem(1, 1, 8, 8, 1), "a ConvProblem")):
        with pytest.raises(ValueError, match=f"nanovllm has no kernel for {what}"):
            prepare(problem, torch.device("cpu"), H200)


def test_sample():
    plans = plan(FEW["gemm"][1], H200)
    assert sample(plans, 0) == list(range(len(plans))) and sample(plans[:7], 40) == list(range(7))
    some = sample(plans, 40)
    assert len(set(some)) == 40 and some[:20] == list(range(20)) and 0.9 * len(plans) < some[-1] < len(plans)


SLOW = dict.fromkeys(range(9), 2e-6)


@pytest.mark.parametrize(
    "seconds, options, expected",
    [
        ({0: 2e-6, 1: 3e-6, 2: 2e-6, 3: 2e-6, 4: 1.9e-6, 30: 1e-6}, {}, (0, 30, 0.5, False, 30)),
        # The first choice did not run: the next one stands for it, and five are still counted.
        ({1: 2e-6, 2: 3e-6, 3: 3e-6, 4: 3e-6, 5: 1e-6, 6: 0.5e-6}, {}, (1, 6, 0.25, False, 6)),
        # Within the noise the first five need not contain the very best.
        ({**SLOW, 3: 1.009e-6, 7: 1e-6}, {}, (0, 7, 0.5, True, 3)),
        ({**SLOW, 3: 1.011e-6, 7: 1e-6}, {}, (0, 7, 0.5, False, 7)),
        # The engine's own kernel, which is not planned, counts against the first choice, not against the first five.
        ({**SLOW, 9: 1e-6}, {"own": 9, "kept": 9}, (0, 9, 0.5, True, 0)),
        # Fewer plans than five do not make it one of the first five.
        ({0: 2e-6, 1: 1e-6}, {"own": 1, "kept": 1}, (0, 1, 0.5, True, 0)),
    ],
)
def test_judge(seconds, options, expected):
    found = judging.judge(plan(FEW["gemm"][1], H200), seconds, **options)
    ranks = found["first"]["rank"], found["best"]["rank"]
    assert (*ranks, found["share"], found["best_in_first_five"], found["near_rank"]) == expected


def test_a_timer_that_nearly_agrees():
    found = measured()
    assert not found["not_measured"] and not found["stopped"] and len(found["shapes"]) == 3
    for s in found["shapes"]:
        assert 0.7 < s["share"] <= 1 and s["timed"] - s["candidates"] in (0, 1) and s["candidates"] > 10
    kinds, total = found["summary"], found["summary"]["all"]
    assert list(kinds) == ["gemm", "streaming", "all"] and total["shapes"] == 3
    assert total["timed"] == kinds["gemm"]["timed"] + kinds["streaming"]["timed"]
    assert total["worst_share"] == min(kinds["gemm"]["worst_share"], kinds["streaming"]["worst_share"])
    exact = measured(timer=noisy(0.0))["summary"]
    assert all(s["worst_share"] > 0.99 and s["median_prediction_error"] < 1e-9 for s in exact.values())
    # What is not reached is named.
    found = measured(limit=0)
    assert not found["shapes"] and len(found["not_measured"]) == 3 and found["summary"] == {}
    cut = measured(timer=lambda *_: {"seconds": {0: 1.0}, "cut": True})
    assert len(cut["not_measured"]) == 3


class Queue:
    """Stands for the compile queue: has compiled one problem at once, the others when they are waited for."""

    def __init__(self, never=(), failing=None):
        self.asked, self.waited, self.never, self.failing = [], [], never, failing

    def ask(self, problem, plans, model):
        if problem == self.failing:
            raise AttributeError("no such kernel\nmore")
        self.asked.append((problem, len(plans)))

    def ready(self, problem):
        return problem in self.waited or problem == FEW["gemm"][1]

    def wait(self, problem, deadline):
        self.waited.append(problem)
        return problem not in self.never


def test_an_error_of_one_shape_does_not_cost_the_others():
    def full(problem, plans, deadline, own=None):
        if problem == FEW["gemm"][1]:
            raise torch.OutOfMemoryError("too large")
        return noisy()(problem, plans, deadline)

    found = measured(timer=full, queue=Queue(failing=FEW["streaming"][0]))
    assert [s["problem"]["m"] for s in found["shapes"]] == [64] and len(found["not_measured"]) == 2
    assert {e["reason"] for e in found["errors"]} == {"AttributeError: no such kernel", "OutOfMemoryError: too large"}
    text = docs_table.markdown([documented(found)])
    assert "Could not be tried: rms_norm 1024 x 1024 bfloat16 (AttributeError: no such kernel); gemm 128" in text


def test_a_broken_context_keeps_what_was_measured():
    calls = []

    def breaks(problem, plans, deadline, own=None):
        calls.append(problem)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access\nmore")
        return noisy()(problem, plans, deadline)

    found = measured(timer=breaks)
    assert len(found["shapes"]) == 1 and len(found["not_measured"]) == 2 == len(calls)
    assert "illegal memory access" in found["stopped"]
    assert "The run stopped early" in docs_table.markdown([documented(found)])


def test_what_is_compiled_is_timed_first_and_kept_as_it_grows():
    order, kept, queue = [], [], Queue()

    def timer(problem, plans, deadline, own=None):
        order.append(problem)
        return noisy()(problem, plans, deadline)

    options = {"timer": timer, "most": 7}
    found = measured(queue=queue, keep=lambda proof: kept.append(proof.document()), keep_seconds=0.0, **options)
    assert [p for p, _ in queue.asked] == [FEW["gemm"][0], FEW["streaming"][0], FEW["gemm"][1]]
    assert {count for _, count in queue.asked} <= {7, 8}  # seven that the planner keeps, and the built-in choice
    assert order == [FEW["gemm"][1], FEW["gemm"][0], FEW["streaming"][0]]
    # In the order of the problems whatever the order of the timing.
    assert [s["kind"] for s in found["shapes"]] == ["gemm", "streaming", "gemm"] and kept[-1] == found
    assert [(len(k["shapes"]), len(k["not_measured"])) for k in kept] == [(1, 2), (2, 1), (3, 0)]
    late = measured(queue=Queue(never=FEW["streaming"]), **options)
    assert len(late["shapes"]) == 2 and [p["kind"] for p in late["not_measured"]] == ["rms_norm"]


def test_the_best_may_be_the_engines_own():
    problem = GemmProblem(16, 256, 256)  # of the kernel for few rows, which is not planned
    kept = len(plan(problem, H200))

    def timer(problem, plans, deadline, own):
        assert own == len(plans) - 1 == kept
        return {"seconds": {i: (1e-7 if i == own else p.seconds) for i, p in enumerate(plans)}}

    found = measured({"gemm": [problem]}, timer)
    (shape,) = found["shapes"]
    assert shape["best"]["rank"] == kept == shape["candidates"] and shape["share"] < 0.5
    assert "| 0.1 | built in, not kept |" in docs_table.markdown([documented(found)])
    only = measured({"gemm": [problem]}, lambda problem, plans, deadline, own: {"seconds": {own: 1e-6}})
    assert len(only["not_measured"]) == 1


def test_an_earlier_run_is_kept():
    first, second = (documented(measured({kind: FEW[kind][:1]})) for kind in ("gemm", "streaming"))
    both = command.merged(first, second)
    assert [s["kind"] for s in both["shapes"]] == ["gemm", "streaming"] and both["summary"]["all"]["shapes"] == 2
    again = documented(measured({"gemm": FEW["gemm"][:1]}, noisy(0.3)))
    assert command.merged(both, again)["shapes"] == [again["shapes"][0], second["shapes"][0]]
    assert command.merged({**first, "versions": {"torch": "1"}}, second) == second == command.merged(None, second)
    kept = command.merged(first, documented(measured(limit=0)))
    assert len(kept["shapes"]) == 1 and [p.get("m") for p in kept["not_measured"]] == [None, 128]


def test_the_command_fills_tables_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    docs, found = tmp_path / "planner.md", measured()
    docs.write_text(f"before\n{docs_table.BEGIN}{docs_table.END}\nafter\n")

    def fails(*args):
        with pytest.raises(SystemExit):
            command.main([str(a) for a in args])
        return capsys.readouterr().err

    assert "--tables: expected --docs" in fails("--tables")
    assert "--tables: there is no results/<gpu>/planner.json" in fails("--tables", "--docs", docs)
    assert torch.cuda.is_available() or "needs a CUDA device" in fails("--out", "x.json")
    for gpu in ("one", "two"):
        path = tmp_path / "results" / gpu / "planner.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(documented(found, gpu=gpu)))
    for _ in range(2):
        command.main(["--tables", "--docs", str(docs)])
    text = docs.read_text()
    assert text.count("**one**") == text.count("**two**") == 1 and "| all | 3 |" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "gemm 64 x 128 x 256 bfloat16" in text
    for kind in ("| kind", "| all", "| gemm |"), ("| shape", "| gemm 64"):  # as many cells as titles
        assert len({line.count("|") for line in text.splitlines() if line.startswith(kind)}) == 1
    for bad in ("{", "[]", "{}"):
        path.write_text(bad)
        assert "not a file of the planner's proof" in fails("--tables", "--docs", docs)
    docs.write_text("none")
    path.unlink()
    assert "has no lines <!-- planner:begin -->" in fails("--tables", "--docs", docs)
    assert docs_table.markdown([]) == docs_table.NOT_MEASURED


def test_the_documentation_shows_what_was_measured():
    """docs/log/planner.md holds the table of results/*/planner.json."""
    root = Path(__file__).resolve().parents[2]
    documents = [json.loads(path.read_text()) for path in sorted(root.glob("results/*/planner.json"))]
    page = (root / "docs" / "log" / "planner.md").read_text()
    shown = page.partition(docs_table.BEGIN)[2].partition(docs_table.END)[0].strip()
    assert documents and shown == docs_table.markdown(documents)


def test_kept_times_judge_another_model(tmp_path):
    """The ranking is today's, the times are the run's; a shape without times is named."""
    problem, kind = ALL["streaming"][0], "streaming"
    plans, words = plan(problem, H200), judging.in_words(kind, problem)
    us = {str(p.config): 10.0 + i for i, p in enumerate(plans)}  # as today's model ranks them
    shape = {"kind": kind, "problem": words, "candidates": 1, "timed": 1, "share": 0.1, "builtin": None, "took_s": 1.0}
    document = {"schema": 3, "device": asdict(H200), "shapes": [shape], "summary": {}}
    found = judging.judged_again(document, [{"problem": words, "us": us}])
    (judged,) = found["shapes"]
    assert judged["share"] == 1 == found["summary"]["all"]["median_share"] and judged["timed"] == len(plans)
    us[str(plans[7].config)] = 5.0
    (judged,) = judging.judged_again(document, [{"problem": words, "us": us}])["shapes"]
    assert judged["share"] == 0.5 and not judged["best_in_first_five"] and judged["near_rank"] == 7
    for times, message in (([], "no times"), ([{"problem": words, "us": {"old": 1.0}}], "nothing that is planned")):
        with pytest.raises(ValueError, match=message):
            judging.judged_again(document, times)
    out, times = tmp_path / "out.json", tmp_path / "times.json"
    with pytest.raises(ValueError, match="--out"):
        judging.judge_file(out, times)
    out.write_text("{}")
    times.write_text("{}")
    with pytest.raises(ValueError, match="not of one run"):
        judging.judge_file(out, times)
