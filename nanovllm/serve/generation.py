"""What one HTTP request generates: its prompts' streams as one, with its place in the queue and its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nanovllm.frontend.output_stream import OutputStream, RequestFailed
from nanovllm.outputs import RequestOutput
from nanovllm.serve.admission import Ticket
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http import Exchange
from nanovllm.serve.metrics import Metrics
from nanovllm.wording import counted


class Generation:
    """The outputs of one or several prompts. Made by `Service.start`; `close` in every case.

    While it is open, a client that disconnects cancels the task that made it.

    Args:
        closed: called at the end of `close`.
    """

    def __init__(
        self,
        streams: list[OutputStream],
        ticket: Ticket,
        exchange: Exchange,
        metrics: Metrics,
        queue_timeout: float,
        closed: Callable[[Generation], None] | None = None,
    ) -> None:
        self.streams = streams
        self._closed = closed
        self._ticket = ticket
        self._metrics = metrics
        self.exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._ready: dict[int, None] = {}
        """Prompts with news, in order."""
        self._left = len(streams)
        self._not_started = set(range(len(streams)))
        self._waiting: asyncio.Future[None] | None = None
        self._queue_timeout = queue_timeout
        self._timer = self._loop.call_later(queue_timeout, self._expire)
        for index, stream in enumerate(streams):
            stream.listener = lambda index=index: self._news(index)  # type: ignore[misc]
            self._news(index)  # of what came before there was a listener
        self._watch = self._loop.create_task(exchange.wait_for_disconnect())
        self._watch.add_done_callback(self._disconnected)

    async def next(self) -> tuple[int, RequestOutput] | None:
        """(index of the prompt, what is new of it), as soon as there is something; None: that was all.

        Raises:
            As `OutputStream.next`; ApiError: the request has waited too long for its first token.
        """
        while self._left:
            while self._ready:
                index = next(iter(self._ready))
                del self._ready[index]
                stream = self.streams[index]
                if stream.over:
                    continue
                output = stream.take()
                if output is None:
                    continue
                if index in self._not_started:
                    self._started(index)
                if stream.over:
                    self._left -= 1
                    self._metrics.finished(stream, output)
                    if any(completion.seq.finish_reason == "abort" for completion in stream.request.completions):
                        raise RequestFailed("the request was aborted")  # no interface has a finish reason for it
                elif stream.failure is not None:
                    self._ready[index] = None  # the failure comes after what was there before it
                return index, output
            self._waiting = self._loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return None

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of what was generated so far."""
        requests = [stream.request for stream in self.streams]
        prompt = sum(len(request.prompt_token_ids) for request in requests)
        output = sum(request.num_output_tokens for request in requests)
        return {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in self.streams)},
        }  # fmt: skip

    def close(self) -> None:
        """Abort what still runs. It never waits."""
        self._timer.cancel()
        self._watch.cancel()
        for stream in self.streams:
            stream.listener = None
            if not stream.finished:
                self._metrics.aborted()
            stream.close()
        self._ticket.close()
        if self._closed is not None:
            self._closed(self)

    def _news(self, index: int) -> None:
        self._ready[index] = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _started(self, index: int) -> None:
        self._metrics.first_token(self.streams[index])
        self._not_started.discard(index)
        if not self._not_started:
            self._ticket.started()
            self._timer.cancel()

    def _expire(self) -> None:
        error = ApiError(
            503,
            f"the request waited {counted(self._queue_timeout, 'second', 'g')} for its first token; try again later",
            code="queue_timeout", retry_after=5,
        )  # fmt: skip
        self._metrics.rejected("timeout")
        for index in self._not_started:
            self.streams[index].fail(error)
            self._news(index)

    def _disconnected(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and self.exchange.gone and self._task is not None:
            self._task.cancel()
