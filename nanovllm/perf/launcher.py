"""Starts measuring processes, one after the other, and hands on what they say.

Each engine has a process of its own, so that memory, clocks and library state are the same for all, and so that one that
dies takes nothing with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from nanovllm.perf.job import Emit, Job, Row

Launch = Callable[[Job, Emit], None]

_LAST_LINES = 3


def in_child(command: list[str], verbose: bool = False) -> Launch:
    """A launcher that runs `command --worker FD` for each job; see `serve`.

    Args:
        command: the program and its arguments, for example [sys.executable, "bench.py"].
        verbose: let the process write to our stderr, instead of keeping its last lines for when it dies.
    """

    def launch(job: Job, emit: Emit) -> None:
        with tempfile.TemporaryFile("w+") as log:
            read, write = os.pipe()
            # A session of its own: Ctrl-C reaches us alone, and whatever the engine started ends with it.
            process = subprocess.Popen(
                [*command, "--worker", str(write)], stdin=subprocess.PIPE, stdout=sys.stderr if verbose else log,
                stderr=subprocess.STDOUT if not verbose else None, pass_fds=(write,), start_new_session=True, text=True,
            )  # fmt: skip
            os.close(write)
            try:
                process.stdin.write(json.dumps(job.to_json()))
                process.stdin.close()
                with os.fdopen(read) as messages:
                    for line in messages:
                        emit(*json.loads(line))
                code = process.wait()
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
            if code:
                log.seek(0)
                last = " | ".join(log.read().strip().splitlines()[-_LAST_LINES:])
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise WorkerDied(f"the process ended with {how}{': ' + last if last else ''}")

    return launch


class WorkerDied(RuntimeError):
    """A measuring process ended early; the message says how."""


def in_process(llm_class: Any) -> Launch:
    """A launcher that runs jobs here: for debuggers and tests. Engines then share memory and state."""
    from nanovllm.perf.worker import work

    def launch(job: Job, emit: Emit) -> None:
        # Through JSON, as from another process.
        work(Job.from_json(job.to_json()), llm_class, lambda kind, content: emit(kind, json.loads(json.dumps(content))))

    return launch


def serve(descriptor: int, llm_class: Any) -> None:
    """The other end of `in_child`: read a job from stdin, write a JSON line [kind, content] for each thing to say."""
    from nanovllm.perf.worker import work

    job = Job.from_json(json.loads(sys.stdin.read()))
    with os.fdopen(descriptor, "w", buffering=1) as messages:
        os.set_inheritable(descriptor, False)  # so that the pipe ends with us, whatever the engine leaves running
        work(job, llm_class, lambda kind, content: messages.write(json.dumps([kind, content]) + "\n"))


def measure_rows(launch: Launch, job: Job, on_row: Callable[[Row], None], other: Emit) -> None:
    """Run a job; one row for each of its workloads. If its process dies, another one goes on with the next workload.

    Args:
        on_row: is given each row as soon as it is there.
        other: is told all else that the process says.
    """
    todo = list(job.workloads)

    def take(kind: str, content: Any) -> None:
        if kind != "row":
            return other(kind, content)
        row = Row.from_json(content)
        todo[:] = [w for w in todo if w.name != row.workload]
        on_row(row)

    while todo:
        reason = "the process ended without a result"
        before = len(todo)
        try:
            launch(dataclasses.replace(job, workloads=tuple(todo)), take)
        except WorkerDied as error:
            reason = str(error)
        if todo and (before == len(todo) or reason.startswith("the process ended with ")):
            first = todo.pop(0)
            on_row(Row(job.engine, job.variant, job.model, first.name, first.description, reason))
        job = dataclasses.replace(job, measure_rates=False)
