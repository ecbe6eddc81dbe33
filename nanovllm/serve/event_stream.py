"""An answer as server-sent events, which lives as long as its client reads."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from nanovllm.serve.http import Exchange

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)  # fmt: skip
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream:
    """Sends events. The headers go out with the first event or ping, so that an error before it has its own status.

    A client that reads slowly blocks `send`, and with it only the task of its own request.

    Args:
        ping_interval: seconds of silence after which a comment is sent.
        send_timeout: seconds for which a client may read nothing; the request's task is cancelled then.
    """

    def __init__(self, exchange: Exchange, ping_interval: float, send_timeout: float) -> None:
        self._exchange = exchange
        self._ping_interval = ping_interval
        self._send_timeout = send_timeout
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._last = self._loop.time()
        """When the last event was handed over, or began to block."""
        self._blocked = False
        self._ping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._period, self._tick)

    @property
    def started(self) -> bool:
        """Whether the headers have gone out, so that an error must be an event."""
        return self._exchange.status is not None

    @property
    def _period(self) -> float:
        return min(self._ping_interval, self._send_timeout) / 2

    async def send(self, data: bytes) -> None:
        """Send one or several complete events."""
        if self._exchange.status is None:
            await self._exchange.start(200, _HEADERS)
        self._last = self._loop.time()
        self._blocked = True
        await self._exchange.write(data)
        self._blocked = False

    async def finish(self, data: bytes = b"") -> None:
        """Send the last events and end the answer."""
        if data:
            await self.send(data)
        self._last = self._loop.time()
        self._blocked = True  # until `close`: nothing may follow, and a client that takes nothing is cut off here too
        await self._exchange.write(b"", more=False)

    def close(self) -> None:
        """To be called in every case; sends nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ping is not None:
            self._ping.cancel()

    def _tick(self) -> None:
        silence = self._loop.time() - self._last
        if self._blocked:
            if silence >= self._send_timeout and self._task is not None:
                self._exchange.gone = True
                self._task.cancel()
                return
        elif silence >= self._ping_interval * 0.99 and (self._ping is None or self._ping.done()):
            self._ping = self._loop.create_task(self.send(PING))
        self._timer = self._loop.call_later(self._period, self._tick)


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event of a JSON value."""
    data = msgspec.json.encode(value)
    return b"data: " + data + b"\n\n" if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
