"""Timing and checking a plan: what an error means, which shapes are checked, a whole run in the interpreter."""

import os
import subprocess
import sys

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


def test_in_the_interpreter(tmp_path):
    """The real measure and verify, with a clock of the host in place of CUDA graphs; wrong plans are found."""
    command = [sys.executable, "-W", "ignore", "-c", _INTERPRETED, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stdout + done.stderr


_INTERPRETED = """
import os
import sys
from pathlib import Path

import torch
from nanovllm.kernels.op import config_files
from nanovllm.kernels.triton import tunables
from nanovllm.hardware.timing import time_kernel
from nanovllm.tune import Budget, Skipped, measure
from nanovllm.tune.jobs import Job, jobs, target
from nanovllm.tune.run import tune
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.kernels.triton.rows.plans import RowPlan, BlockPlan

measure.time_in_graph = lambda calls, rounds: time_kernel(calls[0], warmup=0, iters=1)
measure.l2_bytes = lambda device: 1000
torch.cuda.empty_cache = lambda: None
cpu = torch.device("cpu")

def timer_of(op, tunable, key, shape, dtype=torch.float32, variant=None):
    job = Job(target(op), tunable, key, shape if isinstance(shape[0], tuple) else (shape,), dtype, variant or {}, None)
    return measure.JobTimer(job, cpu)

timer = timer_of("rms_norm", tunables.RMS_NORM, (4, 96, torch.float32), (3, 96))
assert timer.measure(RowPlan(2, 4), 3) > 0
timer.verify(RowPlan(2, 4))
timer.verify(None)
try:
    timer_of("rms_norm", tunables.RMS_NORM, (4, 97, torch.float32), (3, 96)).measure(RowPlan(2, 4), 3)
except RuntimeError as e:
    assert "did not ask for rms_norm (4, 97" in str(e), e
else:
    raise AssertionError

# Checked with the most rows that the plan is for, and with one fewer.
verified, verify = [], measure.verify
measure.verify = lambda op, launcher, device, case: verified.append(case.shape) or verify(op, launcher, device, case)
timer_of("rms_norm", tunables.RMS_NORM, (8, 96, torch.float32), ((5, 96), (8, 96), (6, 96))).verify(RowPlan(2, 4))
assert verified == [(8, 96), (7, 96)], verified
measure.verify = verify

# An error that may have cost the device names the plan.
def lost(calls, rounds):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
time_in_graph, measure.time_in_graph = measure.time_in_graph, lost
try:
    timer.measure(RowPlan(1, 4), 3)
except measure.TuningError as e:
    assert "RowPlan(rows=1, warps=4) failed" in str(e) and "illegal memory access" in str(e) and timer.alive(), e
else:
    raise AssertionError
measure.time_in_graph = time_in_graph

# A kernel that forgets a part of its row: what a broken configuration would do.
from nanovllm.kernels.triton.rows import activation
key = 256, 64, torch.float32, "silu"
timer = timer_of("silu_and_mul", tunables.ACTIVATE_AND_MUL, key, (4, 64))
timer.verify(BlockPlan(32, 4))
activation.cdiv = lambda a, b: a // b
timer.verify(BlockPlan(32, 4))
timer.verify(BlockPlan(64, 4))
try:
    timer.verify(BlockPlan(128, 4))
except Skipped as e:
    assert str(e).startswith("wrong result: 4x64 float32: "), e
else:
    raise AssertionError
assert tunables.RMS_NORM.find(cpu, 4, 96, torch.float32) is None
try:
    jobs(target("rms_norm"), None, torch.bfloat16, None)
except ValueError as e:
    assert "TRITON_INTERPRET=1: expected it not to be set" in str(e)

# A whole run, from candidates to a file that the kernel then reads; only the launches are recorded elsewhere.
config_files.gpu_of = lambda device: "nvidia-test-9"
key = 4, 96, torch.float32
job = Job(target("rms_norm"), tunables.RMS_NORM, key, ((3, 96), (4, 96)), torch.float32, {}, RowPlan(4, 1))
budget = Budget(patience=3, batch=4)
(result,) = tune([job], cpu, device_model("h200"), "nvidia-test-9", Path(sys.argv[1]), budget=budget)
assert result.outcome.best is not None and result.outcome.default_seconds > 0, result
os.environ["NANOVLLM_KERNEL_CONFIGS"] = sys.argv[1]
tunables.RMS_NORM.forget()
with tunables.RMS_NORM.using(cpu, (), None):
    pass
assert tunables.RMS_NORM.find(cpu, *key) == result.outcome.best
x = torch.randn(3, 96)
ours = target("rms_norm").launcher.fn(x, torch.ones(96), 1e-6)
torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (96,), eps=1e-6))
print("done")
"""
