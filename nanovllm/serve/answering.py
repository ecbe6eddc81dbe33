"""Runs a generation into an answer: as events while it is made, or whole at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from nanovllm.outputs import RequestOutput
from nanovllm.serve.errors import ApiError
from nanovllm.serve.event_stream import DONE, EventStream, event
from nanovllm.serve.generation import Generation
from nanovllm.serve.http import Exchange
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.protocol import ChatRequest, CompletionRequest
from nanovllm.serve.request_params import as_api_error
from nanovllm.serve.service import Service

logger = logging.getLogger(__name__)


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


class ChunkedAnswer:
    """What the answers of chats and completions have in common: the head, the chunks of a stream, and its end.

    Args:
        name: what an answer's id begins with, and its `object`.
        usage: the usage so far.
        before, after: JSON of a plain chunk's choice before and after its text. A plain chunk has no more than a text,
            so it need not be encoded as a whole.
    """

    def __init__(
        self,
        service: Service,
        request: ChatRequest | CompletionRequest,
        name: tuple[str, str],
        usage: Callable[[], dict[str, Any]],
        before: bytes,
        after: bytes,
    ) -> None:
        self._head = {
            "id": name[0], "object": name[1], "created": int(time.time()), "model": service.model_name,
            "system_fingerprint": service.fingerprint,
        }  # fmt: skip
        options = request.stream_options
        forced = service.options.enable_force_include_usage
        self._wants_usage = forced or options is not None and options.include_usage is True
        self._continuous = self._wants_usage and options is not None and options.continuous_usage_stats is True
        self._usage = usage
        has_logprobs = request.logprobs is not None and request.logprobs is not False  # 0 asks for some
        self._plain = not (has_logprobs or request.return_token_ids or self._continuous)
        head = msgspec.json.encode(self._head)[:-1].replace(b"%", b"%%")
        self._prefix = b'data: %b,"choices":[{"index":%%d,%b' % (head, before)
        self._suffix = after + (b'}],"usage":null}\n\n' if self._wants_usage else b"}]}\n\n")

    def _plain_chunk(self, index: int, text: str) -> bytes:
        return self._prefix % index + msgspec.json.encode(text) + self._suffix

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        if self._wants_usage:
            more["usage"] = self._usage() if self._continuous else None
        return event({**self._head, "choices": [choice], **more})

    def _counted(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage as the end of an answer tells it."""
        return usage

    def end(self, usage: dict[str, Any]) -> bytes:
        if not self._wants_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._counted(usage)}) + DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE


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
                extra = {"request_id": exchange.request_id}
                logger.exception("request %s failed within its stream", exchange.request_id, extra=extra)
            last = shape.error(told)
        await events.finish(last)
    finally:
        events.close()
