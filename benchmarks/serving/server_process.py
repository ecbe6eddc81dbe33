"""A server in a process group of its own, whose log says why it did not start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nanovllm.bench.launcher import with_causes

_LAST_LINES = 20
_SECONDS_TO_END = 20.0


class ServerFailed(RuntimeError):
    """A server did not start, or has ended; the message has the end of its log."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServerProcess:
    """Starts a server. `wait` until it is ready; `close` in every case.

    Args:
        command: its arguments; "{port}" in them stands for a free port of 127.0.0.1.
        env: its whole environment.
        log: the file for what it prints.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._started = time.monotonic()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in command], env=dict(env), stdout=file,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def wait(self, limit: float) -> float:
        """Wait until /health answers 200.

        Args:
            limit: seconds since the start of the process.

        Returns:
            Seconds since the start of the process.

        Raises:
            ServerFailed: the process has ended, or is not ready within the limit.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            self.check()
            seconds = time.monotonic() - self._started
            with suppress(OSError, urllib.error.URLError):
                if opener.open(f"{self.url}/health", timeout=5).status == 200:
                    return seconds
            if seconds > limit:
                raise ServerFailed(self._with_log(f"{self.name} is not ready after {limit:g} s"))
            time.sleep(0.2)

    def check(self) -> None:
        """Raise ServerFailed if the process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ServerFailed(self._with_log(f"{self.name} ended with {how}"))

    def close(self) -> None:
        """End the process and what it started."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _with_log(self, reason: str) -> str:
        printed = self._log.read_text(errors="replace")
        lines = printed.strip().splitlines()[-_LAST_LINES:]
        return "\n    ".join([f"{with_causes(reason, printed)}; the end of its log:", *lines])
