"""All tests that need a GPU, in one command: `make test-gpu`, or `python -m tests.gpu_run [arguments of pytest]`.

Most of their time goes into compilers, so there is a process for each CPU core, if the GPUs' free memory allows.
Processes take the GPUs in turn: each sees one. With two GPUs or more the tests of several GPUs run beside them, in one
process that sees all. Meanwhile the libraries of C++ kernels are compiled. At the end come, in one process and with
nothing beside them, the tests marked `alone`, which that process has imported before, and a summary. Those processes
load `gpu_plugin.py`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from tests.gpu_plugin import ALONE, GPUS, REPORT, SEVERAL_GPUS, SIDE_BY_SIDE, TURN
from tests.gpu_results import Results

ROOT = Path(__file__).parents[1]
GIB_A_PROCESS = 6
"""Few tests need more, with copies in float64: experts take 13 GiB."""


def num_processes(cores: int, free_gib: Sequence[float]) -> int:
    """One for each core, but only as many as the GPU with the least free memory has room for, times the GPUs."""
    return max(1, min(cores, len(free_gib) * int(min(free_gib) / GIB_A_PROCESS)))


Devices = tuple[list[str], list[str], list[float]]
"""(what CUDA_VISIBLE_DEVICES calls each GPU, its name, GiB that are free)"""


def devices_here() -> Devices:
    """Asked in a process that ends, since one that has started CUDA keeps memory."""
    code = (
        "import json, torch\n"
        "gpus = range(torch.cuda.device_count())\n"
        "free = [torch.cuda.mem_get_info(i)[0] / 2**30 for i in gpus]\n"
        "print(json.dumps([[torch.cuda.get_device_name(i) for i in gpus], free]))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    names, free = json.loads(done.stdout)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (given.split(",") if given else [str(i) for i in range(len(names))])[: len(names)], names, free


# Of all three folders at the same time. A test that needs a library before it is there waits for it.
_CUDA_LIBRARY = """
import sys, torch
from pathlib import Path
from nanovllm.kernels.cuda import build
folder = build.SOURCES / sys.argv[1]
if torch.cuda.is_available() and build.cuda_support(torch.device("cuda", 0), folder) is None:
    build.load_library(torch.cuda.get_device_capability(0), folder)
"""
_CPU_LIBRARY = """
import torch
from nanovllm.kernels.cpu import build
if build.cpu_support(torch.device("cpu")) is None:
    build.load_library()
"""


class Run:
    """Processes of pytest and of compilers, what they reported, and the time that is left."""

    def __init__(self, folder: Path, environment: dict[str, str], seconds: float | None, seconds_a_test: float) -> None:
        self.folder, self.environment, self.seconds_a_test = folder, environment, seconds_a_test
        self.end = None if seconds is None else time.monotonic() + seconds
        self.reports: dict[int, Path] = {}  # by the number of the process
        self.processes: list[subprocess.Popen[bytes]] = []
        self.broken: list[str] = []

    def pytest(self, *arguments: str, quiet: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """Starts pytest. quiet: what it prints goes to a file, which `wait` shows if a test failed."""
        report = self.folder / f"{len(self.reports)}.jsonl"
        command = [
            sys.executable, "-m", "pytest", "-p", "tests.gpu_plugin", "-p", "no:cacheprovider", "-q", "--color=no",
            "-o", f"faulthandler_timeout={self.seconds_a_test}", "-o", "faulthandler_exit_on_timeout=true", *arguments,
        ]  # fmt: skip
        process = self.start(command, quiet, **environment, **{REPORT: str(report)})
        self.reports[process.pid] = report
        return process

    def start(self, command: Sequence[str], quiet: bool, **environment: str) -> subprocess.Popen[bytes]:
        out = open(self.folder / f"{len(self.processes)}.txt", "wb") if quiet else None
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment | environment, stdout=out, stderr=out, start_new_session=True
        )
        self.processes.append(process)
        return process

    def wait(self, process: subprocess.Popen[bytes], what: str) -> None:
        """Until it ends, or its time is over. Of pytest an end is good if it agrees with what its report says."""
        try:
            code = process.wait(self.seconds_left)
        except subprocess.TimeoutExpired:
            self.broken.append(f"{what}: stopped, the time is over")
            self.stop(process)
            return
        self.stop(process)  # processes that a test which hung has started
        if code:
            self.show(process)
        if said := self._fault(code, self.reports.get(process.pid)):
            self.broken.append(f"{what}: {said}")

    def _fault(self, code: int, report: Path | None) -> str | None:
        """What the counts do not say. pytest's codes: 0 and 1 are of tests, 5 is no test, also if every worker died."""
        results = Results.read([report] if report else [])
        if code not in (0, 1, 5) or code and not report or code == 1 and not results.named("failed"):
            return f"ended with code {code}"
        if report and results.collected is None and not results.tests:
            return "every process ended before it had collected the tests"
        blind = sum(test.said == "Skipped: no CUDA device" for test in results.tests.values())
        return f"{blind:,} tests found no CUDA device" if blind else None

    @property
    def seconds_left(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def show(self, process: subprocess.Popen[bytes]) -> None:
        path = self.folder / f"{self.processes.index(process)}.txt"
        if path.exists():
            print(path.read_text(errors="replace"), flush=True)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """With all that it has started."""
        for number, seconds in ((signal.SIGINT, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(process.pid, number)
                process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def main(arguments: Sequence[str] | None = None, devices: Callable[[], Devices] = devices_here) -> int:
    """0 if every test that was collected ended well, and one did; the summary is printed in any case."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, help="stop after this time, and say what did not end")
    parser.add_argument("--processes", type=int, help="instead of one a core, as far as memory allows")
    hangs = "a test that takes longer hangs: its process ends with a traceback, and the others go on (default: 200)"
    parser.add_argument("--seconds-a-test", type=float, default=200, metavar="SECONDS", help=hangs)
    given, rest = parser.parse_known_args(arguments)
    gpus, names, free = devices()
    if not gpus:
        print("make test-gpu: no CUDA device here; `make test` runs what needs none")
        return 2
    paths = [a for a in rest if not a.startswith("-") and (ROOT / a.split("::")[0]).exists()]
    cores = len(os.sched_getaffinity(0))
    processes = given.processes or num_processes(cores, free)
    print(f"{len(gpus)} GPU(s): {', '.join(names)}, {min(free):.0f} GiB free; {cores} cores: {processes} processes")
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):  # the processes are in sessions of their own, and would go on
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # also while an interrupted run ends its processes
        # Each process has a core, without Inductor's compilers. It is no worker of a pytest-xdist around this program.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
        environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | ours
        run = Run(Path(folder), environment, given.seconds, given.seconds_a_test)
        try:
            _run_all(run, turn, gpus, processes, rest if paths else [*rest, "tests"])
        except KeyboardInterrupt:
            run.broken.append("interrupted")
        finally:
            for process in run.processes:
                run.stop(process)
        results = Results.read(run.reports.values())
    print(f"\n{'=' * 30} GPU tests {'=' * 30}")
    print("\n".join(results.summary()[:-1] + run.broken))
    print(f"{results.summary()[-1]} in {time.monotonic() - started:.0f} s on {len(gpus)} x {names[0]}")
    incomplete = results.named("failed") or results.named(None) or results.not_begun or not results.named("passed")
    return 1 if run.broken or incomplete else 0


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout make test-gpu` sends it, and make passes it on
    raise KeyboardInterrupt


def _run_all(run: Run, turn: TextIO, gpus: list[str], processes: int, arguments: list[str]) -> None:
    """One process, too, is a worker's, with `-n 1`: another takes its place if a test hangs.

    turn: a file that is locked; it is unlocked when the tests that run alone may begin.
    """
    libraries = [run.start([sys.executable, "-c", _CUDA_LIBRARY, name], True) for name in (".", "packed", "fp8")]
    libraries.append(run.start([sys.executable, "-c", _CPU_LIBRARY], True))
    several = run.pytest("-n", "1", "-m", SEVERAL_GPUS, *arguments, quiet=True) if len(gpus) > 1 else None
    many = run.pytest(
        "-n", str(processes), "--dist", "load", "--maxschedchunk", "1", "-m", SIDE_BY_SIDE, *arguments,
        **{GPUS: ",".join(gpus)},
    )  # fmt: skip
    alone = run.pytest("-n", "1", "-m", ALONE, *arguments, CUDA_VISIBLE_DEVICES=gpus[0], **{TURN: turn.name})
    run.wait(many, "the tests side by side")
    if several is None:
        print("one GPU: tests with the marker several_gpus are left out", flush=True)
    else:
        run.wait(several, "the tests of several GPUs")
    for process in libraries:
        run.wait(process, "a library of C++ kernels")
    if run.seconds_left == 0:
        run.broken.append("the tests that run alone: not begun, the time is over")
        run.stop(alone)
        return
    print("the tests that run alone:", flush=True)
    fcntl.flock(turn, fcntl.LOCK_UN)
    run.wait(alone, "the tests that run alone")


if __name__ == "__main__":
    sys.exit(main())
