"""Reaches an engine in a process of its own, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields
from typing import Any

import msgspec

from nanovllm.config import EngineConfig
from nanovllm.engine.core_messages import AbortRequest, Deliver, Died, EngineInfo, StartRequest, StepOutputs
from nanovllm.serve.frames import ABORT, CONFIG, FAILED, READY, START, STEP, FrameReader, frame, read_frames

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
_STOP_SECONDS = 15.0
_LONGEST_PAUSE = 60.0
_STABLE_SECONDS = 120.0
"""An engine that lived so long is started again at once."""


class EngineStartError(RuntimeError):
    """The engine's process could not start; the message says why."""


class ProcessClient:
    """An engine in another process.

    Its socket is read by the event loop that calls `attach`: the front end and its connections share one thread, which
    never waits for the engine.

    Args:
        config: the arguments of the engine.
        restart: start the engine again when it has died.

    Raises:
        ValueError: the engine refuses its arguments or the model.
        EngineStartError: it ended for another reason.
    """

    def __init__(self, config: EngineConfig, restart: bool = True, log_level: int = logging.WARNING) -> None:
        given = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
        assert given["fast_policy"] is None, "a policy stays in its process"
        self._config = {"config": given, "log_level": log_level}
        self._restart = restart
        self._deliver: Deliver | None = None
        self._died: Died | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decode = msgspec.msgpack.Decoder(StepOutputs).decode
        self._closed = False
        self._deaths = 0
        self._adopt(*self._spawn())

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def listen(self, deliver: Deliver, died: Died) -> None:
        self._deliver, self._died = deliver, died

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this event loop read what the engine says. To be called once, in the loop's thread."""
        self._loop = loop
        loop.add_reader(self._sock, self._read)
        self._write()

    def start(self, request: StartRequest) -> None:
        self._send(frame(START, request))

    def abort(self, request: AbortRequest) -> None:
        self._send(frame(ABORT, request))

    def close(self) -> None:
        self._closed = True
        self._alive = False
        self._detach()
        self._sock.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # ------------------------------------------------------------------------------------------------ the process

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket, EngineInfo]:
        """Start a process and wait until its engine is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "nanovllm.serve.engine_process", str(theirs.fileno())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        try:
            ours.sendall(frame(CONFIG, self._config))
            kind, data = next(read_frames(ours), (None, b""))
        except BaseException:
            process.kill()
            raise
        if kind == READY:
            return process, ours, msgspec.msgpack.decode(data, type=EngineInfo)
        ours.close()
        code = process.wait()
        if kind == FAILED:
            raise ValueError(msgspec.msgpack.decode(data, type=str))
        raise EngineStartError(f"the engine's process ended with exit code {code} while it started")

    def _adopt(self, process: subprocess.Popen[bytes], sock: socket.socket, info: EngineInfo) -> None:
        sock.setblocking(False)
        self._process, self._sock, self._info = process, sock, info
        self._reader, self._out, self._writing = FrameReader(), bytearray(), False
        self._started_at = time.monotonic()
        self._last_words = ""
        self._alive = True

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)

    def _lost(self) -> None:
        """The engine has closed its end, or cannot be reached."""
        if self._closed or not self._alive:
            return
        self._alive = False
        self._detach()
        self._sock.close()
        threading.Thread(target=self._bury, name="engine-restart", daemon=True).start()

    def _bury(self) -> None:
        """In a thread: learn why the engine ended, tell it, and start another one."""
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        reason = self._last_words or "its process ended with " + (
            f"signal {-code}" if code < 0 else f"exit code {code}"
        )
        logger.error("the engine ended: %s", reason)
        assert self._died is not None
        self._died(reason)
        while self._restart and not self._closed:
            stable = time.monotonic() - self._started_at > _STABLE_SECONDS
            self._deaths = 1 if stable else self._deaths + 1
            time.sleep(0 if self._deaths <= 1 else min(2.0**self._deaths, _LONGEST_PAUSE))
            if self._closed:
                return
            logger.warning("the engine is started again")
            try:
                found = self._spawn()
            except Exception as error:
                logger.error("the engine cannot be started: %s", error)
                self._started_at = time.monotonic()
                continue
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._take_over, *found)
            except RuntimeError:  # the loop was closed meanwhile; the new process ends with its socket
                found[1].close()
            return

    def _take_over(self, *found: Any) -> None:
        if self._closed:
            found[1].close()
            return
        self._adopt(*found)
        assert self._loop is not None
        self.attach(self._loop)
        logger.warning("the engine serves again")

    # ------------------------------------------------------------------------------------------------ the socket

    def _read(self) -> None:
        try:
            data = self._sock.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        assert self._deliver is not None
        for kind, message in self._reader.feed(data):
            if kind == STEP:
                self._deliver(self._decode(message))
            else:
                assert kind == FAILED, kind
                self._last_words = msgspec.msgpack.decode(message, type=str)

    def _send(self, data: bytes) -> None:
        loop = self._loop
        if loop is None:
            self._out += data
            return
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            self._out += data
            self._write()
        else:
            loop.call_soon_threadsafe(self._send, data)

    def _write(self) -> None:
        if not self._alive:
            self._out.clear()
            return
        try:
            while self._out:
                del self._out[: self._sock.send(memoryview(self._out)[:_PIECE])]
        except BlockingIOError:
            pass
        except OSError:
            self._lost()
            return
        assert self._loop is not None
        if self._out and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._write)
        elif not self._out and self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
