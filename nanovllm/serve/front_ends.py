"""The engine's side of its connections: what every front end asks, and what a step brought, to all of them."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from nanovllm.frontend.core import EngineCore
from nanovllm.frontend.core_messages import AbortRequest, StartRequest
from nanovllm.serve.frames import ABORT, HELLO, READY, START, frame, read_frames

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 8 << 20
_MOST_BEHIND = 64 << 20
_PATIENCE_SECONDS = 20.0
_EXIT_SECONDS = 10.0
_THREAD_SECONDS = 5.0


class Outbox:
    """Sends to one front end without waiting for it.

    What the socket does not take at once is sent by a thread. A front end that is `most_behind` bytes behind holds up
    the sender. If it takes nothing for `patience` seconds after that, its connection is closed.
    """

    def __init__(
        self, sock: socket.socket, most_behind: int = _MOST_BEHIND, patience: float = _PATIENCE_SECONDS
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._sock = sock
        self._most_behind, self._patience = most_behind, patience
        self._behind = bytearray()
        self._changed = threading.Condition()
        self._closed = False
        self.cut_off = False
        """Whether this side has closed the connection."""
        self._thread: threading.Thread | None = None

    def send(self, data: bytes) -> None:
        """Called from any thread. Does nothing when the front end has gone."""
        with self._changed:
            if not self._behind and not self._closed:
                data = data[self._push(data) :]
            if not data or self._closed:
                return
            self._behind += data
            if self._thread is None:
                self._thread = threading.Thread(target=self._catch_up, name="send", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._wait_for_reader()

    def flush(self, seconds: float) -> None:
        """Wait until everything was sent, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._behind, seconds)

    def close(self) -> None:
        with self._changed:
            self._closed = self.cut_off = True
            self._changed.notify_all()
            try:
                self._sock.shutdown(socket.SHUT_RDWR)  # the thread that reads sees the end, and closes it
            except OSError:
                pass

    def join(self, seconds: float) -> None:
        """After `close`: wait for the thread that sends, for at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _push(self, data: bytes | bytearray) -> int:
        """Returns: bytes that the socket took."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the front end has gone; the reader sees it as well
            self._closed = True
            return len(data)

    def _wait_for_reader(self) -> None:
        size, since = len(self._behind), time.monotonic()
        while len(self._behind) > self._most_behind and not self._closed:
            self._changed.wait(self._patience / 4)
            if len(self._behind) < size:
                size, since = len(self._behind), time.monotonic()
            elif time.monotonic() - since > self._patience:
                logger.error("a front end reads nothing and is %d bytes behind: its connection is closed", size)
                self.close()

    def _catch_up(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._behind or self._closed)
                if self._closed:
                    return
            poll.poll(1000)
            with self._changed:
                del self._behind[: self._push(self._behind[: 1 << 20])]
                self._changed.notify_all()


class FrontEnds:
    """The front ends of an engine. The first one started the process, which ends when that one has gone.

    Args:
        first: the socket of the first one.
        frames: what it sends after its configuration.
        exit_seconds: how long the process may live when the first one has gone.
    """

    def __init__(
        self, first: socket.socket, frames: Iterator[tuple[int, bytes]], exit_seconds: float = _EXIT_SECONDS
    ) -> None:
        self._frames = frames
        self._exit_seconds = exit_seconds
        self._outboxes: dict[int, Outbox] = {0: Outbox(first)}
        self._first = first
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._wake, self._woken = socket.socketpair()
        """Closing the former ends the thread that accepts."""

    def send(self, kind: int, message: object) -> None:
        """To all of them, encoded once."""
        data = frame(kind, message)
        for outbox in tuple(self._outboxes.values()):
            outbox.send(data)

    def serve(self, core: EngineCore, listener: socket.socket | None) -> None:
        """Let the front ends reach `core`, in threads. listener: where further front ends connect; None: none do."""
        self.send(READY, core.info)
        self._start("receive", self._receive_first, core, listener)
        if listener is not None:
            self._start("accept", self._accept, core, listener)

    def close(self, seconds: float = _THREAD_SECONDS) -> None:
        """Close the connections and wait for the threads, for at most `seconds`.

        To be called before the process ends: a thread that is in C++ code while the interpreter ends, for example
        since the last reference to a tensor goes there, aborts the process.
        """
        end = time.monotonic() + seconds
        self._closed = True
        self._wake.close()
        with suppress(OSError):
            self._first.shutdown(socket.SHUT_RD)  # what was sent may still be on its way
        while self._threads:
            thread = self._threads.pop()
            for number, outbox in tuple(self._outboxes.items()):
                if number:
                    outbox.close()
            thread.join(max(0.0, end - time.monotonic()))
        self._outboxes[0].close()
        for outbox in tuple(self._outboxes.values()):
            outbox.join(max(0.0, end - time.monotonic()))

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()]
        thread.start()
        self._threads.append(thread)

    def flush(self, seconds: float) -> None:
        """Wait until they have what was sent, at most for so long each."""
        for outbox in tuple(self._outboxes.values()):
            outbox.flush(seconds)

    def _receive_first(self, core: EngineCore, listener: socket.socket | None) -> None:
        _receive(self._frames, core)
        cut_off = self._closed or self._outboxes[0].cut_off
        if listener is not None and not cut_off:  # a process that was killed did not do this
            path = Path(listener.getsockname())
            with suppress(OSError):
                path.unlink()
                path.parent.rmdir()
        core.close()
        # A step that never ends must not keep the GPU.
        timer = threading.Timer(self._exit_seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _accept(self, core: EngineCore, listener: socket.socket) -> None:
        poll = select.poll()
        for waited in (self._woken, listener):
            poll.register(waited, select.POLLIN)
        while not any(descriptor == self._woken.fileno() for descriptor, _ in poll.poll()):
            sock, _ = listener.accept()
            self._start("receive", self._receive_further, core, sock)

    def _receive_further(self, core: EngineCore, sock: socket.socket) -> None:
        with sock:
            frames = read_frames(sock)
            kind, data = next(frames, (None, b""))
            if kind != HELLO:  # it has gone already
                return
            number = msgspec.msgpack.decode(data, type=int)
            outbox = Outbox(sock)
            outbox.send(frame(READY, core.info.of_front_end(number)))
            self._outboxes[number] = outbox
            try:
                _receive(frames, core)
            finally:
                del self._outboxes[number]
                outbox.close()
                core.abort_front_end(number)
                outbox.join(_THREAD_SECONDS)  # `close` waits for this thread alone


def _receive(frames: Iterator[tuple[int, bytes]], core: EngineCore) -> None:
    """Until the front end closes its connection."""
    start = msgspec.msgpack.Decoder(StartRequest)
    abort = msgspec.msgpack.Decoder(AbortRequest)
    for kind, data in frames:
        if kind == START:
            core.start(start.decode(data))
        elif kind == ABORT:
            core.abort(abort.decode(data))
