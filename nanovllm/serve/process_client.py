"""Reaches an engine in a process of its own, and starts it again when it dies."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import msgspec

from nanovllm.config import EngineConfig
from nanovllm.frontend.core_messages import EngineInfo
from nanovllm.serve.frames import CONFIG, FAILED, READY, frame, read_one
from nanovllm.serve.socket_client import SocketClient

logger = logging.getLogger(__name__)

_STOP_SECONDS = 15.0
_LONGEST_PAUSE = 60.0
_STABLE_SECONDS = 120.0
"""A process that lived so long is started again at once."""


class EngineStartError(RuntimeError):
    """The engine's process could not start; the message says why."""


class RestartDelay:
    """For how long to wait before a process that has died is started again: longer each time it dies soon."""

    def __init__(self) -> None:
        self._deaths = 0
        self.started()

    def started(self) -> None:
        self._started_at = time.monotonic()

    def died(self) -> float:
        """Seconds."""
        stable = time.monotonic() - self._started_at > _STABLE_SECONDS
        self._deaths = 1 if stable else self._deaths + 1
        return 0 if self._deaths <= 1 else min(2.0**self._deaths, _LONGEST_PAUSE)


def end_of(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process that is about to end, and kill it if it does not; returns its exit code or signal in words."""
    try:
        code = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class ProcessClient(SocketClient):
    """An engine in another process, which this starts.

    Args:
        config: the arguments of the engine.
        restart: start the engine again when it has died.
        shared: let further front ends connect at `path`.

    Raises:
        ValueError: the engine refuses its arguments or the model.
        EngineStartError: it ended for another reason.
    """

    def __init__(
        self, config: EngineConfig, restart: bool = True, log_level: int = logging.WARNING, shared: bool = False,
        log_json: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        given = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
        assert given["fast_policy"] is None, "a policy stays in its process"
        self._config = {"config": given, "log_level": log_level, "log_json": log_json}
        self._restart = restart
        self._delay = RestartDelay()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._listener: socket.socket | None = None
        try:
            if shared:
                self._listen()
            self._adopt(*self._spawn())
        except BaseException:
            self._stop_listening()
            raise

    @property
    def path(self) -> str:
        """The Unix socket where further front ends connect, also while no engine runs."""
        assert self._folder is not None, "shared=True makes one"
        return str(Path(self._folder.name) / "engine")

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def close(self) -> None:
        super().close()
        self._stop_listening()
        end_of(self._process)

    def _listen(self) -> None:
        """In a folder that only this user may enter."""
        self._folder = tempfile.TemporaryDirectory(prefix="nanovllm-")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.path)
        except OSError as error:  # names of sockets have at most about 100 characters
            raise ValueError(
                f"no socket at {self.path} ({error}); set TMPDIR to a folder with a shorter name"
            ) from None
        self._listener.listen(128)

    def _stop_listening(self) -> None:
        if self._listener is not None and self._folder is not None:
            self._listener.close()
            self._folder.cleanup()

    def _spawn(self) -> tuple[socket.socket, EngineInfo]:
        """Start a process and wait until its engine is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = [s.fileno() for s in (theirs, self._listener) if s is not None]
            command = [sys.executable, "-m", "nanovllm.serve.engine_process", *map(str, passed)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)
        try:
            ours.sendall(frame(CONFIG, self._config))
            kind, data = read_one(ours)
        except BaseException:
            process.kill()
            raise
        if kind == READY:
            self._process = process
            self._delay.started()
            return ours, msgspec.msgpack.decode(data, type=EngineInfo)
        ours.close()
        code = process.wait()
        if kind == FAILED:
            raise ValueError(msgspec.msgpack.decode(data, type=str))
        raise EngineStartError(f"the engine's process ended with exit code {code} while it started")

    def _reason(self) -> str:
        ended = end_of(self._process)
        reason = self._last_words or f"its process ended with {ended}"
        logger.error("the engine ended: %s", reason)
        return reason

    def _another(self) -> tuple[socket.socket, EngineInfo] | None:
        while self._restart and not self._closed:
            time.sleep(self._delay.died())
            if self._closed:
                break
            logger.warning("the engine is started again")
            try:
                found = self._spawn()
            except Exception as error:
                logger.error("the engine cannot be started: %s", error)
                self._delay.started()
                continue
            return found
        return None

    def _take_over(self, sock: socket.socket, info: EngineInfo) -> None:
        super()._take_over(sock, info)
        if self.alive:
            logger.warning("the engine serves again")
