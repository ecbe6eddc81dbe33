"""Streams whose client takes nothing."""

import asyncio

import pytest

from nanovllm.serve.event_stream import EventStream
from nanovllm.serve.http import Exchange


def test_the_end_of_a_stream_that_is_not_read():
    """Nothing follows the end, and the client is cut off."""
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))
        if not message.get("more_body", True):
            await asyncio.sleep(60)

    async def run():
        exchange = Exchange({"method": "POST", "path": "/", "headers": []}, asyncio.Event().wait, send, "id")
        events = EventStream(exchange, ping_interval=0.02, send_timeout=0.2)
        try:
            await events.finish(b"data: x")
        finally:
            events.close()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert sent == [b"", b"data: x", b""]
