"""The threads of the C++ kernels: beside a process that keeps a core busy, with several callers, and too many."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.cpu import build

if (reason := build.cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

# Jobs of some 0.1 ms, as in a step of a small model. A line on standard input asks for a measurement.
MEASURE = """
import os, sys, time, torch
os.sched_setaffinity(0, {processors})
from nanovllm.kernels.cpu.library import PackedMatrix
matrix, x = PackedMatrix.of(torch.randn(1536, 576)), torch.randn(1, 576)
for line in sys.stdin:
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(8000):
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


CALLERS = """
import threading, torch
from nanovllm.kernels.cpu.library import PackedMatrix
torch.manual_seed(0)
matrices, inputs = [PackedMatrix.of(torch.randn(300, 64)) for _ in range(3)], torch.randn(3, 5, 64)
expected = [matrix.product(x) for matrix, x in zip(matrices, inputs)]

def call(i):
    for _ in range(1000):
        assert torch.equal(matrices[i].product(inputs[i]), expected[i]), i
    done.append(i)

done = []
callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(sorted(done))
"""

TOO_MANY = """
import resource
from nanovllm.kernels.cpu.library import threads
used = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))  # a stack takes 8 MB
try:
    threads()
except ValueError as e:
    print(e)
"""


def output(python, code, **variables):
    done = python.run("-c", code, env=os.environ | variables)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()


def test_several_threads_call_at_the_same_time(warm_python):
    """As two engines do, each in a thread: a call releases Python's lock."""
    assert output(warm_python, CALLERS, NANOVLLM_CPU_THREADS="2") == "[0, 1, 2]"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_threads_than_the_system_starts_are_an_error(warm_python):
    said = "NANOVLLM_CPU_THREADS=5000: the system does not start 5000 threads; set it to less"
    assert output(warm_python, TOO_MANY, NANOVLLM_CPU_THREADS="5000") == said


def test_threads_work_or_rest_by_how_long_they_waited(tmp_path):
    """Made up waits and times: neighbours, pauses, callers by turns, and a system that does not tell."""
    try:
        compiler = build.compiler()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    program, source = tmp_path / "crowding", Path(__file__).parent / "crowding.cpp"
    includes = f"-I{Path(build.__file__).parent}"
    subprocess.run([compiler, "-std=c++20", "-pthread", includes, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "as expected\n")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors and Linux"
)
def test_two_threads_beside_a_busy_process_are_not_slower_than_one():
    build.load_library()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    code = MEASURE.format(processors={first, second})
    busy = f"import os; os.sched_setaffinity(0, {{{second}}})\nwhile True: pass"
    with process(code, NANOVLLM_CPU_THREADS=1) as one, process(code, NANOVLLM_CPU_THREADS=2) as two, process(busy):
        for worker in (one, two):
            measured(worker)  # its import and first calls
        found, good = [], False
        while not good and len(found) < 40:  # other processes may disturb many of them
            found += [(measured(one), measured(two)) for _ in range(4)]
            wall = [min(pair[i][0] for pair in found) for i in range(2)]
            # Two threads took 1.2 times as long as one before they noticed that one of them waits for its core.
            # Idle threads sleep.
            good = wall[1] < 1.25 * wall[0] and min(pair[1][1] for pair in found) < 0.02
    assert good, found
