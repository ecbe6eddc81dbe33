"""The proof's timing, with a clock that says what it is told; and that the plans' launches compute the right thing."""

import os
import random
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks.planner_proof import gpu_timer, input_sets
from benchmarks.planner_proof.compile_queue import CompileQueue
from benchmarks.planner_proof.problems import ALL, plan
from benchmarks.planner_proof.proof import prove
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import GemmProblem

H200 = device_model("h200")


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
        timer = gpu_timer.GpuTimer(H200, bench=clock)
        assert timer.glance([seconds] * sets, seconds, best) == pytest.approx(seconds)
        assert clock.spent < most
    # Far from the best: two calls of a slow kernel, a graph of a fast one.
    clock = Clock()
    slow = gpu_timer.GpuTimer(H200, bench=clock).glance([5 * seconds] * sets, seconds, seconds)
    assert slow > gpu_timer.FAR * seconds and clock.spent < 15e-3
    assert clock.recorded == (seconds < 300e-6)


def test_slow_only_once_is_not_far():
    """The first call loads the kernel."""
    clock = Clock()
    found = gpu_timer.GpuTimer(H200, bench=clock).glance([5e-3, 600e-6], 600e-6, 600e-6)
    assert clock.recorded == 1 and found > 600e-6


def test_finalists_are_compared_in_turns():
    assert gpu_timer.finalists({i: 1.0 / (1 + i) for i in range(20)}) == [0, 1, 2, 3, 4, *range(12, 20)]
    assert gpu_timer.finalists({3: 1.0, 7: 2.0}) == gpu_timer.finalists({3: 1.0, 7: 2.0}, 9) == [3, 7]
    assert gpu_timer.finalists({i: 1.0 + i for i in range(20)}, 15) == [*range(8), 15]
    clock = Clock(0.05)
    found = gpu_timer.GpuTimer(H200, bench=clock).compare([[1e-5] * 6, [2e-5] * 6, [5e-4] * 2])
    assert found == pytest.approx([1e-5, 2e-5, 5e-4], rel=0.05)
    assert gpu_timer.repeats(1e-3, 25, 12e-3, 5) == 12 and gpu_timer.repeats(1e-6, 25, 12e-3, 5) == 25
    assert gpu_timer.repeats(1.0, 25, 12e-3, 5) == 5


def test_the_timer_counts_failures_and_wrong_results(monkeypatch):
    """Everything of `GpuTimer` but the GPU: seconds are the plans' own, some plans fail or compute something else."""
    problem = GemmProblem(128, 256, 256)
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
    made = input_sets.InputSets([(right,)] * 4, run, lambda arguments: arguments[0], library)
    monkeypatch.setattr(input_sets, "prepare", lambda *_: made)
    bench = Called()
    bench.stream = None
    timer = gpu_timer.GpuTimer(H200, lambda p, i: "CompilationError: no" if p is problem and i == 3 else None, bench)
    swift = [replace(p, seconds=1e-9) if i == 20 else p for i, p in enumerate(plans)]
    wrong = (plans[2], swift[20])
    found = timer(problem, swift, time.monotonic() + 600)
    # In the order in which they were compared: those that lead at once, the others as finalists.
    assert 20 not in found["seconds"] and {w["config"] for w in found["wrong"]} == {str(p.config) for p in wrong}
    assert found["seconds"] == pytest.approx({i: plans[i].seconds for i in found["seconds"]})  # it did not set the pace
    own = timer(problem, plans, time.monotonic() + 600, 39)
    assert own["seconds"][39] == pytest.approx(plans[39].seconds)
    wrong, _ = (plans[2],), tried.clear()
    found = timer(problem, plans, time.monotonic() + 600)
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
    nothing = gpu_timer.GpuTimer(H200, lambda p, i: "no", bench)(problem, plans[:2], time.monotonic() + 600)
    assert not nothing["seconds"] and len(nothing["failed"]) == 2


def test_the_library_multiplies_in_the_dtype_of_the_problem(monkeypatch):
    seen, linear, cpu = [], input_sets.F.linear, torch.device("cpu")

    def watched(*arguments):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return linear(*arguments)

    monkeypatch.setattr(input_sets.F, "linear", watched)
    before = torch.backends.cuda.matmul.fp32_precision
    for dtype in ("tfloat32", "float32", "bfloat16"):
        made = input_sets.prepare(GemmProblem(4, 4, 4, dtype), cpu, H200, sets=1)
        made.library(made.sets[0])
    assert seen == ["tf32", "ieee", before] and torch.backends.cuda.matmul.fp32_precision == before


LAUNCHES = """
import dataclasses, random, torch
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import *
from benchmarks.planner_proof.builtin_choice import OwnKernel, builtin
from benchmarks.planner_proof.input_sets import prepare
from benchmarks.planner_proof.problems import plan
random.seed(0)
cpu, h100, a100 = torch.device("cpu"), device_model("h100"), device_model("a100")
def check(p, choose, model=h100):
    inputs = prepare(p, cpu, model, sets=1)
    expected = inputs.reference(inputs.sets[0])
    for x in choose(p, model):
        error = (inputs.run(x, inputs.sets[0]).float() - expected).abs().max() / expected.abs().max()
        assert error < 0.01, (p, x.config, error)
def some(p, model):
    return random.sample(plan(p, model), 2)
check(GemmProblem(70, 96, 128), some); check(GemmProblem(33, 50, 70, "float32"), some, a100)
check(AttentionProblem(2, 24, 300, 4, 2, 64, dtype="float16"), some)
for i in (1, 2, 3):
    check(ElementwiseProblem(3000, i), some)
for kind in ("softmax", "layer_norm", "rms_norm"):
    check(ReductionProblem(kind, 7, 1000, "float32"), some)
    check(ReductionProblem(kind, 3, 3000, "float32"), lambda p, m: [x for x in plan(p, m) if not x.config.one_pass][:1])
    if kind != "softmax":  # a row in pieces
        check(ReductionProblem(kind, 7, 768, "float16"), lambda p, m: [x for x in plan(p, m) if x.config.held > 1])
    own = lambda p, m: [dataclasses.replace(plan(p, m)[0], config=OwnKernel(kind, 4))]
    check(ReductionProblem(kind, 7, 300, "float32"), own)
for p in (GemmProblem(1, 96, 256), GemmProblem(16, 96, 512), GemmProblem(33, 64, 1024, "float16")):
    check(p, lambda p, m: [builtin(p, a100)])
print("right")
"""


@pytest.mark.slow
def test_launches_compute_what_they_should(warm_python):
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    done = warm_python.run("-c", LAUNCHES, timeout=900, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.stdout.strip().endswith("right"), done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.alone
def test_timing_on_a_gpu(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from nanovllm.hardware.gpu_presets import this_device

    model = this_device(torch.device("cuda", torch.cuda.current_device()))
    problems = {
        "gemm": [GemmProblem(300, 1000, 2000)], "streaming": [ALL["streaming"][7]],
        "attention": [ALL["attention"][5]],
    }  # fmt: skip
    missed = []
    listener = lambda *, src, cache_hit, **rest: cache_hit or missed.append(src.name)  # noqa: E731
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    queue = CompileQueue(len(os.sched_getaffinity(0)))
    try:
        with torch.inference_mode():
            found = prove(model, problems, gpu_timer.GpuTimer(model, queue.failure), 300, 8, queue).document()
    finally:
        queue.close()
    assert len(found["shapes"]) == 3 and not found["stopped"] and not missed
    for s in found["shapes"]:
        assert not s["wrong"] and len(s["failed"]) <= 2, s
        assert 0.2 < s["first"]["predicted_us"] / s["first"]["us"] < 3, s
    started = time.monotonic()
    with torch.inference_mode():
        nothing = prove(model, problems, gpu_timer.GpuTimer(model), 0).document()
    assert not nothing["shapes"] and time.monotonic() - started < 5
