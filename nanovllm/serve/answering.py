"""Runs a generation into an answer: as events while it is made, or whole at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.outputs import RequestOutput
from nanovllm.serve.errors import ApiError
from nanovllm.serve.event_stream import EventStream
from nanovllm.serve.generation import Generation
from nanovllm.serve.http import Exchange
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.protocol import StreamOptions
from nanovllm.serve.sampling import as_api_error

logger = logging.getLogger(__name__)


class StreamUsage:
    """What the chunks of a stream say of its usage.

    Attributes:
        wanted: there is a last chunk with the usage.
        continuous: all chunks have the usage so far.
    """

    def __init__(self, options: StreamOptions | None, usage: Callable[[], dict[str, Any]]) -> None:
        self.wanted = options is not None and options.include_usage is True
        self.continuous = self.wanted and options is not None and options.continuous_usage_stats is True
        self._usage = usage

    def now(self) -> dict[str, Any] | None:
        return self._usage() if self.continuous else None


class Answer(Protocol):
    """The shape of an interface's answers."""

    def feed(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Take what is new; returns the events that say so, maybe none."""

    def end(self, usage: dict[str, Any]) -> bytes:
        """The last events."""

    def error(self, error: ApiError) -> bytes:
        """The last events of a generation that failed."""

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""


async def answer(
    exchange: Exchange, generation: Generation, shape: Answer, stream: bool, options: ServeOptions
) -> None:
    """Answer a request. The caller closes the generation.

    Raises:
        ApiError and others: the generation failed before anything of the answer was sent.
    """
    if not stream:
        while (item := await generation.next()) is not None:
            shape.feed(*item)
        await exchange.answer_json(shape.whole(generation.usage()))
        return
    events = EventStream(exchange, options.ping_interval, options.send_timeout)
    try:
        try:
            while (item := await generation.next()) is not None:
                if data := shape.feed(*item):
                    await events.send(data)
            last = shape.end(generation.usage())
        except Exception as error:
            if not events.started:
                raise
            told = as_api_error(error)
            if told.status == 500:
                logger.exception("request %s failed within its stream", exchange.request_id)
            last = shape.error(told)
        await events.finish(last)
    finally:
        events.close()
