"""Timing and checking a plan: what an error means, which shapes are checked, a whole run in the interpreter."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.tune.measure import reason_of


def test_why_a_plan_cannot_run():
    out = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})(
        "out of resource: shared memory, Required: 9"
    )
    out.name = "shared memory"
    assert reason_of(out) == "out of shared memory: out of resource: shared memory, Required: 9"
    assert reason_of(RuntimeError("PassManager::run failed")).startswith("does not compile: ")
    assert reason_of(ValueError("x: no")) == "refused: x: no"
    assert reason_of(torch.OutOfMemoryError("x")).startswith("out of device memory")
    assert reason_of(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def test_in_the_interpreter(tmp_path, warm_python):
    """The real measure and verify, with a clock of the host in place of CUDA graphs; wrong plans are found."""
    done = warm_python.run("-c", _INTERPRETED, str(tmp_path), env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stdout + done.stderr


_INTERPRETED = """
import os
import sys
from functools import partial
from pathlib import Path

import torch
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.hardware.timing import time_kernel
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.provider import Provider
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.rows.plans import BlockPlan, RowPlan
from nanovllm.tune import Budget, Skipped
from nanovllm.tune.jobs import TuningJob, jobs
from nanovllm.tune.measure import JobTimer, TuningError
from nanovllm.tune.run import tune

cpu, f32 = torch.device("cpu"), torch.float32
on_host = lambda calls, rounds: time_kernel(calls[0], warmup=0, iters=1)

def timer_of(op, tunable, key, *shapes, clock=on_host):
    return JobTimer(TuningJob(all_ops()[op], tunable, key, shapes, f32, {}, None), cpu, clock)

def error_of(kind, call, *args):
    try:
        call(*args)
    except kind as e:
        return str(e)
    raise AssertionError(f"no {kind.__name__}")

timer = timer_of("rms_norm", tunables.RMS_NORM, (4, 96, f32), (3, 96))
assert timer.measure(RowPlan(2, 4), 3) > 0
timer.verify(RowPlan(2, 4))
timer.verify(None)
other = timer_of("rms_norm", tunables.RMS_NORM, (4, 97, f32), (3, 96))
assert "did not look up rms_norm (4, 97" in error_of(TuningError, other.measure, RowPlan(2, 4), 3)

# An error that may have cost the device names the plan.
def lost(calls, rounds):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

said = error_of(TuningError, timer_of("rms_norm", tunables.RMS_NORM, (4, 96, f32), (3, 96), clock=lost).measure,
                RowPlan(1, 4), 3)
assert "RowPlan(rows=1, warps=4) failed" in said and "illegal memory access" in said and timer.alive()

# A plan that makes a kernel wrong is refused, with the case: of the most rows, and of one row less.
op, cases = all_ops()["rms_norm"], []

def wrong(x, weight, eps, **more):
    cases.append(x.shape[0])
    return op.native(x, weight, eps) + (x.shape[0] == 7)

op.providers["triton"] = Provider("triton", wrong)
job = timer_of("rms_norm", tunables.RMS_NORM, (8, 96, f32), (5, 96), (8, 96), (6, 96))
assert error_of(Skipped, job.verify, RowPlan(2, 4)).startswith("wrong result: 7x96 float32: ") and cases == [8, 7]
assert "TRITON_INTERPRET=1: expected it not to be set" in error_of(ValueError, jobs, "rms_norm", None, f32, None)

# A whole run, from candidates to a file; only the launches are recorded elsewhere.
key, chosen = (256, 64, f32, "silu"), BlockPlan(128, 1)
job = TuningJob(all_ops()["silu_and_mul"], tunables.ACTIVATE_AND_MUL, key, ((4, 64),), f32, {}, chosen)
options = dict(timer=partial(JobTimer, clock=on_host), budget=Budget(patience=3, batch=4))
(result,) = tune([job], cpu, device_model("h200"), "nvidia-test-9", Path(sys.argv[1]), **options)
assert chosen in result.outcome.ranking and result.entry["builtin_us"] > 0, result
assert (Path(sys.argv[1]) / "nvidia-test-9.json").exists()
print("done")
"""
