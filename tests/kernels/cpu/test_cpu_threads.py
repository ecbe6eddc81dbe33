"""The threads of the C++ kernels beside a process that keeps a core busy."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from nanovllm.kernels.cpu.build import cpu_support, load_library

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)
if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
    pytest.skip("needs two processors and Linux", allow_module_level=True)

# Jobs of some 0.1 ms, as in a step of a small model. A line on standard input asks for a measurement.
MEASURE = """
import os, sys, time, torch
os.sched_setaffinity(0, {processors})
from nanovllm.kernels.cpu.library import PackedMatrix
matrix, x = PackedMatrix.of(torch.randn(1536, 576)), torch.randn(1, 576)
for line in sys.stdin:
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(2000):
        matrix.product(x)
    wall, busy = time.perf_counter() - begin, time.process_time() - cpu
    time.sleep(0.2)
    idle = time.process_time() - cpu - busy
    print(wall, idle, flush=True)
"""


@contextmanager
def process(code, **variables):
    env = os.environ | {name: str(value) for name, value in variables.items()}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def measured(worker):
    worker.stdin.write("\n")
    worker.stdin.flush()
    return [float(word) for word in worker.stdout.readline().split()]


@pytest.mark.slow
def test_two_threads_beside_a_busy_process_are_not_slower_than_one():
    load_library()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    code = MEASURE.format(processors={first, second})
    busy = f"import os; os.sched_setaffinity(0, {{{second}}})\nwhile True: pass"
    with process(code, NANOVLLM_CPU_THREADS=1) as one, process(code, NANOVLLM_CPU_THREADS=2) as two, process(busy):
        for worker in (one, two):
            measured(worker)  # its import and first calls
        found = [(measured(one), measured(two)) for _ in range(7)]
    wall = [min(pair[i][0] for pair in found) for i in range(2)]
    # A thread that waits for every slice of the busy process makes it several times slower.
    assert wall[1] < 1.5 * wall[0], found
    # Idle threads sleep.
    assert min(pair[1][1] for pair in found) < 0.02, found
