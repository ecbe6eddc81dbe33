"""Starts measuring processes, one after the other, and hands on their messages.

Each engine has a process of its own, so that memory, clocks and library state are the same for all, and so that one
that dies takes nothing with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from nanovllm.bench.job import Emit, Job, ResultRow, stopped
from nanovllm.hardware.measured_rates import Rates

Launch = Callable[[Job, Emit], None]

_LAST_LINES = 3
_LAST_BYTES = 2**20
_LINE = 300
_SECONDS_TO_END = 30.0
_ERROR = re.compile(r"(?:[\w.]*(?:Error|Exception)|Fatal Python error|CUDA error): *(\S.*)")


def in_child(command: list[str], verbose: bool = False, paths: Mapping[str, str] | None = None) -> Launch:
    """A launcher that runs `command --worker FD` for each job; see `serve`.

    Args:
        command: the program and its arguments, for example [sys.executable, "bench.py"].
        verbose: let the process write to our stderr, instead of keeping what it prints for when something goes wrong.
        paths: engine -> a folder of packages that its process finds before all others.
    """

    def launch(job: Job, emit: Emit) -> None:
        with tempfile.TemporaryFile() as log:
            read, write = os.pipe()
            # A process group of its own: Ctrl-C reaches this process alone, and what the engine started ends with it.
            process = subprocess.Popen(
                [*command, "--worker", str(write)], stdin=subprocess.PIPE, stdout=sys.stderr if verbose else log,
                stderr=subprocess.STDOUT if not verbose else None, pass_fds=(write,), start_new_session=True, text=True,
                env=_environment((paths or {}).get(job.engine)),
            )  # fmt: skip
            os.close(write)
            alarm, rang, kind = threading.Timer(0, lambda: None), threading.Event(), ""

            def ring() -> None:
                rang.set()
                _kill(process.pid)

            try:
                assert process.stdin is not None  # a pipe, as asked for above
                with suppress(BrokenPipeError):  # it has ended already, and its exit code says so
                    process.stdin.write(json.dumps(job.to_json()))
                    process.stdin.close()
                with os.fdopen(read) as messages:
                    for line in messages:
                        said, content = json.loads(line)
                        if said == "run":  # the workload goes on, and so does its time limit
                            emit(said, content)
                            continue
                        kind = said
                        alarm.cancel()
                        if kind == "failed":
                            content["error"] = with_causes(content["error"], _printed(log))
                        emit(kind, content)
                        if kind == "started" and job.limit is not None:
                            alarm = threading.Timer(job.limit, ring)
                            alarm.start()
                try:
                    code = process.wait(_SECONDS_TO_END)
                except subprocess.TimeoutExpired:
                    code = 0  # it has said everything
            finally:
                alarm.cancel()
                _kill(process.pid)
                process.wait()
            if rang.is_set() and kind == "started" and job.limit is not None:
                raise WorkerDied(stopped(job.limit))
            if code and not rang.is_set():
                printed = _printed(log)
                last = " | ".join(printed.strip().splitlines()[-_LAST_LINES:])
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise WorkerDied(with_causes(f"the process ended with {how}{': ' + last if last else ''}", printed))

    return launch


def _environment(folder: str | None) -> dict[str, str]:
    """Our variables, with `folder` first among the places where Python looks for packages.

    What the process prints is written at once: a signal that ends it would lose its last lines, which say why.
    """
    found = [folder, os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(f for f in found if f), "PYTHONUNBUFFERED": "1"}


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _printed(log: Any) -> str:
    """The end of what a process has printed. `pread`, since a seek would move where a running process writes."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")


def with_causes(reason: str, printed: str) -> str:
    """A reason, with the last printed lines that look like errors, of any of the engine's processes.

    The error of vLLM's front end, for example, only says that its core has died.
    """
    causes: list[str] = []
    for line in printed.splitlines():
        found = _ERROR.search(line)
        if found and found[1].strip()[:_LINE] not in reason and not any(found[1].strip()[:_LINE] in c for c in causes):
            causes.append(found[0].strip()[:_LINE])
    return f"{reason}; printed before: {' | '.join(causes[-_LAST_LINES:])}" if causes else reason


class WorkerDied(RuntimeError):
    """A measuring process ended early; the message says how."""


def in_process(llm_class: Any, rates_of: Callable[[Job], Rates] | None = None) -> Launch:
    """A launcher that runs jobs here: for debuggers and tests. Engines then share memory and state."""
    from nanovllm.bench.measuring_process import work

    def launch(job: Job, emit: Emit) -> None:
        # Through JSON, as from another process.
        again = Job.from_json(job.to_json())
        work(again, llm_class, lambda kind, content: emit(kind, json.loads(json.dumps(content))), rates_of)

    return launch


def serve(descriptor: int, llm_class: Any) -> None:
    """The other end of `in_child`: read a job from stdin, write a JSON line [kind, content] for each thing to say."""
    from nanovllm.bench.measuring_process import work

    job = Job.from_json(json.loads(sys.stdin.read()))
    with os.fdopen(descriptor, "w", buffering=1) as messages:
        os.set_inheritable(descriptor, False)  # so that the pipe ends with us, whatever the engine leaves running
        work(job, llm_class, lambda kind, content: messages.write(json.dumps([kind, content]) + "\n"))


def measure_rows(launch: Launch, job: Job, on_row: Callable[[ResultRow], None], other: Emit) -> None:
    """Run a job. If its process dies or ends early, another process goes on with the next workload.

    Args:
        on_row: takes the row of each workload as soon as it is there.
        other: takes all other messages of the process.
    """
    todo = list(job.workloads)
    failed = False

    def take(kind: str, content: Any) -> None:
        nonlocal failed
        if kind not in ("row", "failed"):
            other(kind, content)
            return
        failed = failed or kind == "failed"
        row = ResultRow.from_json(content)
        todo[:] = [w for w in todo if w.name != row.workload]
        on_row(row)

    while todo:
        died = ""
        before, failed = len(todo), False
        try:
            launch(dataclasses.replace(job, workloads=tuple(todo)), take)
        except WorkerDied as error:
            died = str(error)
        # A process that ended after a failed row had begun no other workload.
        if todo and not failed and (died or before == len(todo)):
            first = todo.pop(0)
            reason = died or "the process ended without a result"
            on_row(ResultRow(job.engine, job.variant, job.model, first.name, first.description, reason))
