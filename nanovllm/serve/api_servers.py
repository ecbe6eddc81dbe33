"""Several API processes in front of one engine (`--api-servers`).

The first one is the server's main process. It starts the engine and the other API processes, keeps the listening
sockets of all of them, and starts those again that die. The kernel deals connections out (SO_REUSEPORT). Each API
process has a connection to the engine. Each further one has another to the first one, for what all must agree on:

    DRAIN           first -> other   stop taking requests; a second one: end at once
    COUNT, COUNTED  first -> other   what have you counted? and the answer
    SUM, SUMMED     other -> first   what have all of us counted? and the answer
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from nanovllm.serve.channel import Channel, Gathering
from nanovllm.serve.counts import Counts, total
from nanovllm.serve.frames import CONFIG, COUNT, COUNTED, DRAIN, READY, SUM, SUMMED, frame, read_one
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.process_client import RestartDelay, end_of

if TYPE_CHECKING:
    from nanovllm.serve.server import Server

logger = logging.getLogger(__name__)

_COUNT_SECONDS = 2.0
_SUM_SECONDS = 2 * _COUNT_SECONDS
_decode_counts = msgspec.msgpack.Decoder(Counts).decode


class ApiProcessConfig(msgspec.Struct):
    """What a further API process is told at its start."""

    options: ServeOptions
    host: str
    tls: tuple[tuple[str, Any], ...]
    engine_path: str
    log_level: int
    log_json: bool
    access_log: bool
    otlp_endpoint: str | None
    number: int = 0
    """Of the front end; see `FurtherClient`."""


class _Process:
    """A further API process, or the one that has taken its place."""

    def __init__(self, index: int, listening: socket.socket) -> None:
        self.index = index
        self.listening = listening
        self.delay = RestartDelay()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.channel: Channel | None = None
        self.ready = False
        self.counts: Counts | None = None
        self.counted: asyncio.Future[None] | None = None


class ApiServers:
    """The further API processes, of the first one.

    Args:
        config: for each of them.
        listening: a socket for each.
        restart: start those again that have died.

    Raises:
        RuntimeError: one of them does not start.
    """

    leads = True

    def __init__(self, config: ApiProcessConfig, listening: Sequence[socket.socket], restart: bool = True) -> None:
        self._config = config
        self._restart = restart
        self._processes = [_Process(i + 1, sock) for i, sock in enumerate(listening)]
        self._numbers = 0
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._early_drains = 0
        """Calls of `drain` before there was an event loop: a signal may come while the server starts."""
        self._retired: list[Counts] = []
        """One record: of the processes that have ended."""
        self._gathering = Gathering()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            for process in self._processes:
                self._spawn(process)
            for process in self._processes:
                self._wait(process)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the further processes."""
        return [p.process.pid for p in self._processes if p.process is not None]

    def attach(self, server: Server) -> None:
        """Called in the event loop of the first process's server when that takes requests."""
        self._server, self._loop = server, asyncio.get_running_loop()
        for process in self._processes:
            self._talk(process)
        for _ in range(self._early_drains):
            self.drain()

    async def gather(self) -> Counts:
        """What all API processes have counted."""
        return await self._gathering(self._gather)

    def drain(self) -> None:
        """No new requests; the second call ends those that run. Called from any thread, or by a signal's handler."""
        if self._loop is None:
            self._early_drains += 1
        else:
            self._loop.call_soon_threadsafe(self._drain)

    async def ended(self, seconds: float) -> None:
        """Wait until the other processes have ended, for at most `seconds`."""
        running = [p.process for p in self._processes if p.process is not None]
        waits = [asyncio.to_thread(process.wait, seconds) for process in running]
        await asyncio.gather(*waits, return_exceptions=True)

    def close(self) -> None:
        """End the processes that still run."""
        self._draining = True
        for process in self._processes:
            process.listening.close()
            if process.control is not None and process.channel is None:
                process.control.close()
            if process.process is not None:
                process.process.kill()
                process.process.wait()

    # ------------------------------------------------------------------------------------------------ processes

    def _spawn(self, process: _Process) -> None:
        """Start a process. Called by one thread at a time."""
        self._numbers += 1
        process.control, theirs = socket.socketpair()
        process.delay.started()
        with theirs:
            passed = theirs.fileno(), process.listening.fileno()
            command = [sys.executable, "-m", "nanovllm.serve.api_process", *map(str, passed)]
            process.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)
        process.control.sendall(frame(CONFIG, msgspec.structs.replace(self._config, number=self._numbers)))

    def _wait(self, process: _Process) -> None:
        assert process.control is not None and process.process is not None
        kind, _ = read_one(process.control)
        if kind != READY:
            code = process.process.wait()
            raise RuntimeError(f"API process {process.index} ended with exit code {code} while it started")
        process.ready = True

    def _talk(self, process: _Process) -> None:
        assert process.control is not None
        process.channel = Channel(
            process.control, lambda kind, data: self._received(process, kind, data), lambda: self._lost(process)
        )  # fmt: skip

    def _lost(self, process: _Process) -> None:
        process.ready, process.channel = False, None
        if process.counts is not None:
            self._retired = [total([*self._retired, process.counts.ended()])]
            process.counts = None
        self._done(process)
        if not self._draining:
            self._start_task(self._replace(process))

    async def _replace(self, process: _Process) -> None:
        assert process.process is not None
        logger.error("API process %d ended with %s", process.index, await asyncio.to_thread(end_of, process.process))
        if not self._restart:
            process.listening.close()  # else the kernel would give it connections that no process answers
        while self._restart:
            await asyncio.sleep(process.delay.died())
            if self._draining:
                return
            logger.warning("API process %d is started again", process.index)
            try:
                self._spawn(process)
            except OSError as error:  # no memory or no descriptors: there may be some later
                logger.error("API process %d cannot be started: %s", process.index, error)
                continue
            self._talk(process)
            return

    def _drain(self) -> None:
        self._draining = True
        for process in self._processes:
            process.listening.close()  # what it has not accepted is refused, as that of the first process
            if process.ready and process.channel is not None:
                process.channel.send(DRAIN)
            elif process.process is not None:  # it has no clients
                process.process.kill()

    def _start_task(self, running: Any) -> None:
        task = asyncio.get_running_loop().create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------------ counts

    def _received(self, process: _Process, kind: int, data: bytes) -> None:
        if kind == READY:
            process.ready = True
        elif kind == COUNTED:
            process.counts = _decode_counts(data)
            self._done(process)
        elif kind == SUM:
            self._start_task(self._sum(process))

    async def _sum(self, process: _Process) -> None:
        counts = await self.gather()
        if process.channel is not None:
            process.channel.send(SUMMED, counts)

    async def _gather(self) -> Counts:
        assert self._server is not None
        loop, waits = asyncio.get_running_loop(), []
        for process in self._processes:
            if process.ready and process.channel is not None:
                process.counted = loop.create_future()
                process.channel.send(COUNT)
                waits.append(process.counted)
        if waits:
            await asyncio.wait(waits, timeout=_COUNT_SECONDS)
        missing = []
        for process in self._processes:
            if not process.ready:
                missing.append(f"API process {process.index} is not running")
            elif process.counted is not None:
                missing.append(f"API process {process.index} does not answer")
                process.counted = None
        others = [process.counts for process in self._processes if process.counts is not None]
        return total([self._server.service.own_counts(), *self._retired, *others], missing)

    def _done(self, process: _Process) -> None:
        if process.counted is not None and not process.counted.done():
            process.counted.set_result(None)
        process.counted = None


class FirstServer:
    """The first API process, of a further one. When it has gone, this process ends at once.

    Args:
        control: the connection to it.
    """

    leads = False

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._gathering = Gathering()
        self._summed: asyncio.Future[Counts] | None = None

    def attach(self, server: Server) -> None:
        """Called in the event loop of this process's server when that takes requests."""
        self._server = server
        self._channel = Channel(self._control, self._received, self._lost)
        self._channel.send(READY)

    async def gather(self) -> Counts:
        """What all API processes have counted."""
        return await self._gathering(self._gather)

    def drain(self) -> None:
        """The first process tells the others."""

    async def ended(self, seconds: float) -> None:
        """Nothing: the first process waits for the others."""

    def close(self) -> None:
        """Nothing: the connection ends with the process."""

    def _received(self, kind: int, data: bytes) -> None:
        if kind == DRAIN:
            self._server.handle_exit(signal.SIGTERM, None)
        elif kind == COUNT:
            self._channel.send(COUNTED, self._server.service.own_counts())
        elif kind == SUMMED and self._summed is not None and not self._summed.done():
            self._summed.set_result(_decode_counts(data))

    def _lost(self) -> None:
        for _ in range(2):
            self._server.handle_exit(signal.SIGTERM, None)

    async def _gather(self) -> Counts:
        self._summed = asyncio.get_running_loop().create_future()
        self._channel.send(SUM)
        try:
            return await asyncio.wait_for(self._summed, _SUM_SECONDS)
        except asyncio.TimeoutError:
            own = self._server.service.own_counts()
            return msgspec.structs.replace(own, missing=("API process 0 does not answer",), partial=True)


Siblings = ApiServers | FirstServer
