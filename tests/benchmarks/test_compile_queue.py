"""The planner's proof compiles each kernel once, in other processes, into the cache where the launch finds it."""

import time
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.planner_proof import compile_queue as compiling
from benchmarks.planner_proof.input_sets import prepare
from benchmarks.planner_proof.problems import ALL, plan
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import GemmProblem, ReductionProblem

H200 = device_model("h200")


def test_kernels_recur_from_shape_to_shape():
    few, half = (GemmProblem(256, 4096, 1024, dtype) for dtype in ("bfloat16", "float16"))
    more = GemmProblem(2048, 6144, 4096)
    plans = plan(few, H200)[::12]
    first, again, other = (compiling.kernels_of(p, plans, H200) for p in (few, more, half))
    assert first == again and len({needed[0] for needed in first}) == len(plans)
    assert not {k for needed in first for k in needed} & {needed[0] for needed in other}
    for p, needed in zip(plans, first):
        assert needed[0][0].endswith("tma_kernel" if p.config.tma else "tile_kernel")
        assert [name.rsplit(".")[-1] for name, _ in needed[1:]] == ["add_splits"] * (p.config.splits > 1)


def test_what_was_compiled_ahead_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gemm, rows = GemmProblem(64, 256, 512), ReductionProblem("rms_norm", 64, 1024)
    split = next(x for x in plan(gemm, H200) if x.config.splits > 1)
    problems = {gemm: [plan(gemm, H200)[0], split], rows: plan(rows, H200)[:1]}
    queue = compiling.CompileQueue(2)
    try:
        for problem, plans in problems.items():
            queue.ask(problem, plans, H200)
        count = queue.num_kernels
        of_plans = [ks for problem, plans in problems.items() for ks in compiling.kernels_of(problem, plans, H200)]
        needed = {key for keys in of_plans for key in keys}
        sums = [name for name, _ in needed if name.endswith("add_splits")]
        assert sums and count == len(needed) == 3 + len(sums)  # one a plan, and what adds up splits
        for problem, plans in problems.items():
            queue.ask(problem, plans, H200)
        assert queue.num_kernels == count
        deadline = time.monotonic() + 600
        assert all(queue.wait(problem, deadline) and queue.ready(problem) for problem in problems)
        assert all(queue.failure(problem, i) is None for problem, plans in problems.items() for i in range(len(plans)))
    finally:
        queue.close()
    # Launches on real tensors, from this process: all are on disk.
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **rest: hits.append(cache_hit))
    with compiling.following(H200, None):
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
    with pytest.raises(RuntimeError, match="no such thing"), compiling.following(H200, None):
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
