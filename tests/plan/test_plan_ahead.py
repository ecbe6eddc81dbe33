"""Compiling what the planner's proof times: each kernel once, in processes of its own, into the cache where the launch finds it."""

import time
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import AttentionProblem, ElementwiseProblem, GemmProblem, ReductionProblem
from nanovllm.plan import compile_queue as compiling
from nanovllm.plan.launch import prepare
from nanovllm.plan.shapes import ALL, plan

H200 = device_model("h200")


def test_kernels_recur_from_shape_to_shape():
    few, more = GemmProblem(256, 4096, 1024), GemmProblem(2048, 6144, 4096)
    kernels = {
        p: dict(zip([x.config for x in plan(p, H200)], compiling.kernels_of(p, plan(p, H200), H200)))
        for p in (few, more)
    }
    same = set(kernels[few]) & set(kernels[more])
    assert len(same) > 100 and all(kernels[few][c] == kernels[more][c] for c in same)
    assert len({k for needed in kernels[few].values() for k in needed[:1]}) == len(kernels[few])
    for config, needed in kernels[few].items():
        assert needed[0][0].endswith("tma_kernel" if config.tma else "tile_kernel")
        assert [name.rsplit(".")[-1] for name, _ in needed[1:]] == ["add_splits"] * (config.splits > 1)
    # Another dtype and sizes that 16 does not divide are kernels of their own, but for the number of rows.
    known = {k for needed in kernels[more].values() for k in needed}
    for p in (GemmProblem(2048, 6144, 4096, "float16"), GemmProblem(2048, 6136, 4096)):
        plans = plan(p, H200)[:5]
        assert not known & {needed[0] for needed in compiling.kernels_of(p, plans, H200)}


def test_the_proof_compiles_far_fewer_kernels_than_it_times_configurations():
    """Some shapes of each kind, all of which share their kernels."""
    for problems, most in (
        (ALL["attention"][1:2] + ALL["attention"][3:5], 50),
        ([p for p in ALL["gemm"] if p.m == 2048 and p.dtype == "bfloat16"], 500),
    ):
        needed = [k for p in problems for ks in compiling.kernels_of(p, plan(p, H200), H200) for k in ks]
        assert len(problems) >= 3 and len(needed) > 2 * len(set(needed)) and len(set(needed)) <= most


CASES = [
    (GemmProblem(256, 1024, 2048), 2), (GemmProblem(16, 1024, 3072), 1), (AttentionProblem(3, 64, 300, 4, 2, 64), 1),
    (ElementwiseProblem(1 << 20, 2), 1), (ReductionProblem("rms_norm", 64, 1024), 1),
]  # fmt: skip


def test_what_was_compiled_ahead_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problems = {p: plan(p, H200)[:n] for p, n in CASES}
    split = next(x for x in plan(CASES[0][0], H200) if x.config.splits > 1)
    problems[CASES[0][0]] = [problems[CASES[0][0]][0], split]
    ahead = compiling.Ahead(2)
    try:
        for problem, plans in problems.items():
            ahead.ask(problem, plans, H200)
        count = ahead.kernels
        needed = {
            k for problem, plans in problems.items() for ks in compiling.kernels_of(problem, plans, H200) for k in ks
        }
        sums = [name for name, _ in needed if name.endswith("add_splits")]
        assert sums and count == len(needed) == 6 + len(sums)  # one a plan, and what adds up splits
        for problem, plans in problems.items():
            ahead.ask(problem, plans, H200)
        assert ahead.kernels == count
        deadline = time.monotonic() + 120
        assert all(ahead.wait(problem, deadline) and ahead.ready(problem) for problem in problems)
        assert all(ahead.failure(problem, i) is None for problem, plans in problems.items() for i in range(len(plans)))
    finally:
        ahead.close()
    # Launches on real tensors, from this process: all are on disk.
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **rest: hits.append(cache_hit))
    with compiling._following(H200, None):
        for problem, plans in problems.items():
            inputs = prepare(problem, torch.device("cpu"), H200, sets=1)
            for p in plans:
                inputs.run(p, inputs.sets[0])
    assert hits == [True] * count


def test_nothing_of_it_stays():
    before = JITFunction.run, driver._active, triton.knobs.runtime.jit_cache_hook
    problem = ALL["streaming"][0]
    compiling.kernels_of(problem, plan(problem, H200)[:1], H200)
    assert (JITFunction.run, driver._active, triton.knobs.runtime.jit_cache_hook) == before
    with pytest.raises(RuntimeError, match="no such thing"), compiling._following(H200, None):
        raise RuntimeError("no such thing")
    assert (JITFunction.run, driver._active, triton.knobs.runtime.jit_cache_hook) == before


def test_what_takes_too_much_shared_memory_fails_before_it_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = GemmProblem(256, 1024, 2048)
    tile = next(x for x in plan(problem, H200) if x.shared > 100 << 10)
    small = replace(H200, shared_per_block=64 << 10)
    assert "bytes of shared memory, of 65536" in compiling.compile_plan(problem, tile, small)
    assert compiling.compile_plan(problem, tile, H200) is None
    # What this process compiled does not keep its launch from being followed.
    assert compiling.kernels_of(problem, [tile], H200) != [()]
