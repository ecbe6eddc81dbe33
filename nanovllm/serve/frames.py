"""Messages between the processes of a server: a length, a kind and MessagePack, over a Unix socket."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

_HEAD = struct.Struct("<IB")
CONFIG, READY, FAILED, START, ABORT, STEP = range(6)
HELLO, DRAIN, COUNT, COUNTED, SUM, SUMMED = range(6, 12)
"""HELLO: a front end's number, to the engine. The others go between API processes; see `api_servers`."""
encode = msgspec.msgpack.Encoder().encode


def frame(kind: int, message: Any) -> bytes:
    data = encode(message)
    return _HEAD.pack(len(data), kind) + data


class FrameReader:
    """Cuts a stream of bytes into (kind, message's bytes)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The messages that are complete now."""
        buffer = self._buffer
        buffer += data
        found, at = [], 0
        while len(buffer) - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(buffer, at)
            start = at + _HEAD.size
            if len(buffer) - start < length:
                break
            found.append((kind, bytes(memoryview(buffer)[start : start + length])))
            at = start + length
        if at:
            del buffer[:at]
        return found


def read_one(sock: socket.socket) -> tuple[int | None, bytes]:
    """A message from a blocking socket, and nothing of what follows it; (None, b""): the other side has closed it."""
    head = _exactly(sock, _HEAD.size)
    if not head:
        return None, b""
    length, kind = _HEAD.unpack(head)
    data = _exactly(sock, length)
    return (kind, data) if len(data) == length else (None, b"")


def _exactly(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, or an empty result if the connection ended before."""
    found = bytearray()
    while len(found) < size:
        try:
            data = sock.recv(min(size - len(found), 1 << 18))
        except ConnectionError:
            data = b""
        if not data:
            return b""
        found += data
    return bytes(found)


def read_frames(sock: socket.socket) -> Any:
    """Yield (kind, message's bytes) from a blocking socket until the other side closes it."""
    reader = FrameReader()
    while True:
        try:
            data = sock.recv(1 << 18)
        except ConnectionError:
            return
        if not data:
            return
        yield from reader.feed(data)
