"""`make test-gpu` on tests that need no GPU: what runs where, and what is told at the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu_plugin import group_of
from tests.gpu_results import Result, Results
from tests.gpu_run import GIB_A_PROCESS, Run, num_processes

ROOT = Path(__file__).parents[1]
TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("i", range(6))
def test_sees_one_gpu(i):
    time.sleep(0.3)
    with open(os.environ["SEEN"], "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")

@pytest.mark.alone
def test_alone():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3" and os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1"
    with open(os.environ["SEEN"]) as file:
        assert len(file.readlines()) == 6

@pytest.mark.alone
def test_alone_hangs(): time.sleep(100)

@pytest.mark.alone
def test_alone_after_it(): pass

@pytest.mark.several_gpus
def test_several(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"

def test_fails(): assert 1 == 2, "one is not two\\nmore"

def test_skips(): pytest.skip("no such thing")

def test_hangs(): time.sleep(100)
"""
# Too many workers die for all to run, of one part as soon as they import the tests.
DEATHS = """
import os, pytest, subprocess
pytestmark = [pytest.mark.gpu, pytest.mark.alone]
if "NANOVLLM_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ: os._exit(3)

def test_begins():
    with open(os.environ["SEEN"], "a") as file:
        file.write(str(subprocess.Popen(["sleep", "1000"]).pid))

@pytest.mark.parametrize("i", range(8))
def test_dies(i): os._exit(1)
"""
WAITS = """
import os, pathlib, pytest, time
seen = pathlib.Path(os.environ["SEEN"])

@pytest.mark.gpu
def test_waits():
    seen.write_text(str(os.getpid()))
    try:
        time.sleep(1000)
    finally:
        time.sleep(5)

@pytest.mark.gpu
@pytest.mark.alone
def test_alone():
    seen.with_name("alone").touch()
"""
COMPILES = """
import pytest, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
pytestmark = pytest.mark.gpu

@triton.jit
def one_kernel(x):
    tl.store(x, 1)

@pytest.mark.parametrize("i", range(4))
def test_compiles(i):
    triton.compile(ASTSource(one_kernel, {"x": "*i64" if i > 1 else "*i32"}), target=GPUTarget("cuda", 90, 32))
"""
USE_ONE_ENGINE = """
import os, pytest, time
@pytest.mark.gpu
@pytest.mark.parametrize("i", range(5))
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_modes(mode, i):
    with open(os.environ["SEEN"], "a") as file:
        file.write(mode + os.environ["PYTEST_XDIST_WORKER"] + str(i) + "\\n")
    time.sleep(100 if mode == "sync" and i == 2 else 0.1)
"""
ELSEWHERE = "def test_needs_none(): pass"
PROGRAM = """
import sys
from tests.gpu_run import main
sys.exit(main(sys.argv[1:], lambda: (["3", "5"], ["Test 9"] * 2, [40.0, 30.0])))
"""


def start(tmp_path, tests, *options):
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "test_elsewhere.py").write_text(ELSEWHERE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  gpu\n  triton\n  alone\n  several_gpus\n  any_device\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "3,5", "SEEN": str(tmp_path / "seen"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, "--processes", "2", *options, str(tmp_path)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def run(tmp_path, tests, *options):
    """(exit code, lines of the summary, what the tests wrote)"""
    process = start(tmp_path, tests, *options)
    out, _ = process.communicate(timeout=600)
    _, _, summary = out.partition("= GPU tests =")
    return process.returncode, summary.splitlines(), (tmp_path / "seen").read_text().split()


def is_running(process):
    """A process that has ended may still have its number, as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_run_on_two_gpus(tmp_path):
    code, summary, seen = run(tmp_path, TESTS, "--seconds-a-test", "10")
    assert code == 1 and len(seen) == 6 and set(seen) == {"3", "5"}
    assert summary[-1].startswith("9 passed, 1 skipped, 3 failed, 0 did not end, 0 not begun in ")
    assert summary[-1].endswith(" on 2 x Test 9") and not any("needs_none" in line for line in summary)
    told = "\n".join(summary)
    assert "1  no such thing" in told and "AssertionError: one is not two\n" in told
    assert "test_some.py::test_hangs\n      worker" in told and "more" not in told


@pytest.mark.slow
def test_what_triton_compiles_is_compiled_once_and_counted(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "seen").touch()
    code, summary, _ = run(tmp_path, COMPILES)
    told = next(line for line in summary if line.startswith("compiled by Triton: "))
    assert code == 0 and "compiled by Triton: 2 kernels in " in told and ", 0 s of them for what another" in told
    assert summary[summary.index(told) + 1].endswith("  2 x one_kernel")  # by two processes, in four tests


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tests_that_no_process_came_to_are_a_failure_and_no_process_is_left(tmp_path):
    code, summary, (child,) = run(tmp_path, DEATHS)
    assert code == 1 and "the tests side by side: every process ended before it had collected the tests" in summary
    assert summary[-1].startswith("1 passed, 0 skipped, 5 failed, 0 did not end, 3 not begun in ")
    assert not is_running(child)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_is_terminated_ends_its_processes(tmp_path):
    process, seen = start(tmp_path, WAITS), tmp_path / "seen"
    while not (seen.exists() and seen.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "interrupted\n0 passed" in out and "did not end:\n" in out
    assert not is_running(seen.read_text()) and not (tmp_path / "alone").exists()


@pytest.mark.slow
def test_one_process_runs_the_tests_that_use_one_engine(tmp_path):
    """Another one runs those of them that are left when it dies."""
    folder = tmp_path / "tests" / "llm"
    folder.mkdir(parents=True)
    (folder / "test_modes.py").write_text(USE_ONE_ENGINE)
    code, summary, seen = run(tmp_path, ELSEWHERE, "--seconds-a-test", "10")
    assert code == 1 and summary[-1].startswith("9 passed, 0 skipped, 1 failed, 0 did not end, 0 not begun in ")
    workers = {mode: [] for mode in ("async", "sync")}
    for mode, _, told in (line.partition("gw") for line in seen):
        workers[mode].append(told)
    (worker,) = {told[:-1] for told in workers["async"]}
    first, second = {told[:-1]: None for told in workers["sync"]}
    assert worker != first
    assert workers["async"] == [worker + i for i in "01234"]
    assert workers["sync"] == [*(first + i for i in "012"), *(second + i for i in "34")]


def test_tests_of_one_op_that_take_much_memory_run_one_after_the_other():
    path = "tests/kernels/triton/test_verified.py::test_verified"
    names = [
        f"{path}[qk_norm_rope_attention{op}-{dtype}-0]" for op in ("", "_shared") for dtype in ("float16", "float32")
    ]
    groups = [group_of(name) for name in names]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert group_of(f"{path}[rms_norm-float16-0]") != group_of(f"{path}[rms_norm-float32-0]")


def test_a_process_whose_time_is_over_is_stopped(tmp_path):
    run = Run(tmp_path, dict(os.environ), 0.5, 200)
    process = run.start(["sleep", "1000"], quiet=True)
    run.wait(process, "the tests")
    assert run.broken == ["the tests: stopped, the time is over"] and run.seconds_left == 0
    assert process.poll() is not None


def test_as_many_processes_as_there_is_room_for():
    assert num_processes(16, [140.0]) == 16 and num_processes(32, [140.0, 140.0]) == 32
    assert num_processes(16, [2.5 * GIB_A_PROCESS]) == 2
    assert num_processes(16, [10.0 * GIB_A_PROCESS, 2.0 * GIB_A_PROCESS]) == 4
    assert num_processes(1, [1.0]) == 1


def test_a_report_that_ends_within_a_line(tmp_path):
    ends = [("a", "setup", "passed"), ("a", "call", "passed"), ("a", "teardown", "failed"), ("b", "setup", "passed")]
    lines = [
        json.dumps(dict(kind="end", at=i, test=test, when=when, outcome=outcome, said="it broke\nhere", gib=i))
        for i, (test, when, outcome) in enumerate(ends)
    ]
    (tmp_path / "0").write_text("\n".join(lines) + '\n{"kind": "end", "te')
    results = Results.read([tmp_path / "0", tmp_path / "missing"])
    assert results.tests["a"].outcome == "failed" and results.tests["a"].seconds == results.tests["a"].gib == 2
    assert results.tests["b"].outcome is None
    assert results.summary()[-1] == "0 passed, 0 skipped, 1 failed, 1 did not end, 0 not begun"
    assert results.summary()[-6:-1] == ["failed:", "  a", "      it broke", "did not end:", "  b"]


def test_a_summary_has_the_slowest_files_and_one_line_of_each_reason():
    ended = {
        "some.py::a": Result(0, 3.0, "passed", compiled=[("k", "1", 2.0)]),
        "some.py::b[1]": Result(0, 4.0, "passed", "", [("m", "3", 1.0), ("k", "1", 3.0), ("k", "2", 4.0)], gib=12.5),
        "long.py::a": Result(0, 6.5, "skipped", "Skipped: pip failed: 1\nmore 1"),
        "other.py::a": Result(0, 0.5, "skipped", "Skipped: pip failed: 1\nmore 2"),
    }  # fmt: skip
    assert Results(ended).summary(slowest=1, files=2) == [
        "compiled by Triton: 3 kernels in 10 s of all processes, 3 s of them for what another compiled as well:",
        "       9 s     3 x k",
        "       1 s     1 x m",
        "slowest files:",
        "       7 s     2 tests  some.py",
        "       6 s     1 tests  long.py",
        "slowest 1:",
        "     6.5 s  long.py::a",
        "most memory, 8:",
        "    12.5 GiB  some.py::b[1]",
        "skipped:",
        "     2  pip failed: 1",
        "2 passed, 2 skipped, 0 failed, 0 did not end, 0 not begun",
    ]
