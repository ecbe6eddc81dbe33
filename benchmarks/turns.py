"""Processes that get ready together and are measured in turns, so that what slows the machine slows them all.

Each has one thing to measure, such as an engine. A request and its reply are lines of JSON on its standard input and
output; what else it prints goes to its log.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Peer:
    """A process that answers requests.

    Args:
        label: what it is called in messages.
        command: arguments of Python, which call `serve`.
        environment: variables besides those of this process.
        log: a file for what it prints.

    Attributes:
        failure: why it answers no more; None: it does.
    """

    def __init__(self, label: str, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.label, self.log = label, log
        self.failure: str | None = None
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"),
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        self._unread = b""

    def ask(self, request: Any) -> None:
        """Send a request. The reply is read by `reply`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._failed("it ended")

    def reply(self, end: float) -> Any:
        """The next reply; None: it failed, or gave none until `end`, a time of `time.perf_counter`."""
        pipe = self.process.stdout
        assert pipe is not None
        while self.failure is None and b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.perf_counter()))
            got = os.read(pipe.fileno(), 1 << 16) if ready else None
            if not got:
                self._failed("it ended" if ready else "it took too long")
            self._unread += got or b""
        if self.failure is not None:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def has_reply(self, seconds: float) -> bool:
        """Whether a reply, or the end of the process, comes within this time."""
        return b"\n" in self._unread or bool(select.select([self.process.stdout], [], [], max(0.0, seconds))[0])

    def pin(self, cpus: Iterable[int]) -> None:
        """Let every thread of it, and of the processes that it started, run on these CPUs only."""
        allowed = set(cpus)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
                if os.getsid(int(process.name)) == self.process.pid:
                    for thread in (process / "task").iterdir():
                        with suppress(ProcessLookupError):  # one thread that ends leaves others to be pinned
                            os.sched_setaffinity(int(thread.name), allowed)

    def stop(self) -> None:
        """End it and every process that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def _failed(self, why: str) -> None:
        self.stop()
        lines = self.log.read_text(errors="replace").splitlines()[-30:]
        self.failure = "\n".join([f"{self.label}: {why}. Its last lines:", *(f"    {line:.300}" for line in lines)])
        print(self.failure, file=sys.stderr, flush=True)


def serve(answer: Callable[[Any], Any]) -> None:
    """In a `Peer`'s process: answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what other code prints is no reply, in processes that this one starts neither
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # or a process that is killed loses it
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


def stop_on_signals() -> None:
    """Let a SIGTERM, as `timeout` sends it, be an exception, so that a `finally` can stop processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
