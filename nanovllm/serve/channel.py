"""Messages between API processes, and one answer for all callers that ask at the same time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from nanovllm.serve.counts import Counts
from nanovllm.serve.frames import FrameReader, frame


class Channel:
    """A connection to another API process, read by an event loop.

    Args:
        received: called with each message's kind and bytes.
        ended: called when the other side has closed it.
    """

    def __init__(self, sock: socket.socket, received: Callable[[int, bytes], None], ended: Callable[[], None]) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._first: list[bytes] = []
        self._task = asyncio.get_running_loop().create_task(self._run(sock, received, ended))

    def send(self, kind: int, message: Any = None) -> None:
        data = frame(kind, message)
        if self._writer is None:
            self._first.append(data)
        else:
            self._writer.write(data)

    async def _run(
        self, sock: socket.socket, received: Callable[[int, bytes], None], ended: Callable[[], None]
    ) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=sock)
        self._writer.write(b"".join(self._first))
        frames = FrameReader()
        try:
            while data := await reader.read(1 << 16):
                for kind, message in frames.feed(data):
                    received(kind, message)
        except OSError:
            pass
        finally:
            self._writer.close()
        ended()


class Gathering:
    """Runs one call at a time. All callers that ask while it runs get its result."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Counts] | None = None

    async def __call__(self, call: Callable[[], Any]) -> Counts:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(call())
        return await asyncio.shield(self._task)
