"""The front end's side of a connection to an engine in another process."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from abc import ABC, abstractmethod

import msgspec

from nanovllm.frontend.core_messages import AbortRequest, Deliver, Died, EngineInfo, StartRequest, StepOutputs
from nanovllm.serve.frames import ABORT, FAILED, HELLO, READY, START, STEP, FrameReader, frame, read_one

logger = logging.getLogger(__name__)

_PIECE = 1 << 20


class SocketClient(ABC):
    """An engine behind a socket.

    The socket is read by the event loop that calls `attach`: the front end and its connections share one thread, which
    never waits for the engine. When the engine has gone, the client connects to the next one, if there is one.
    """

    _info: EngineInfo
    _sock: socket.socket

    def __init__(self) -> None:
        self._deliver: Deliver | None = None
        self._died: Died | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decode = msgspec.msgpack.Decoder(StepOutputs).decode
        self._closed = self._alive = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

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

    @abstractmethod
    def _reason(self) -> str:
        """Why the engine has ended. Called in a thread once for each loss of the connection."""

    @abstractmethod
    def _another(self) -> tuple[socket.socket, EngineInfo] | None:
        """In that thread: a connection to the next engine, once it is ready; None: there will be none."""

    def _lost(self) -> None:
        if self._closed or not self._alive:
            return
        self._alive = False
        self._detach()
        self._sock.close()
        threading.Thread(target=self._recover, name="engine-recover", daemon=True).start()

    def _recover(self) -> None:
        assert self._died is not None and self._loop is not None
        self._died(self._reason())
        found = self._another()
        if found is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._take_over, *found)
        except RuntimeError:  # the loop was closed meanwhile; a new process ends with its socket
            found[0].close()

    def _take_over(self, sock: socket.socket, info: EngineInfo) -> None:
        if self._closed:
            sock.close()
            return
        self._adopt(sock, info)
        assert self._loop is not None
        self.attach(self._loop)

    def _adopt(self, sock: socket.socket, info: EngineInfo) -> None:
        """Use a connection to an engine that is ready."""
        sock.setblocking(False)
        self._sock, self._info = sock, info
        self._reader, self._out, self._writing = FrameReader(), bytearray(), False
        self._last_words = ""
        self._alive = True

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)

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


class FurtherClient(SocketClient):
    """An engine that another process has started. When it dies, this connects to the one that is started next.

    Args:
        path: the Unix socket where the engine takes front ends.
        number: above 0, and another one for each front end that an engine has had.

    Raises:
        ConnectionError: the engine ended meanwhile.
    """

    def __init__(self, path: str, number: int) -> None:
        super().__init__()
        self._path, self._number = path, number
        self._adopt(*self._connect())

    def _connect(self) -> tuple[socket.socket, EngineInfo]:
        """Wait for an engine. The process that starts engines keeps the listening socket, so connecting succeeds."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self._path)
            sock.sendall(frame(HELLO, self._number))
            kind, data = read_one(sock)
            if kind != READY:
                raise ConnectionError("the engine ended while a front end connected")
        except BaseException:
            sock.close()
            raise
        return sock, msgspec.msgpack.decode(data, type=EngineInfo)

    def _reason(self) -> str:
        return self._last_words or "its process ended"

    def _another(self) -> tuple[socket.socket, EngineInfo] | None:
        while not self._closed:
            try:
                return self._connect()
            except ConnectionError:  # an engine that ended while it started
                continue
            except OSError:  # the process that starts engines has gone
                break
        return None
