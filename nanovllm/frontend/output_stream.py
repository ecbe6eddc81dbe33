"""The front end's half of a request: its texts grow as tokens come, and its consumer takes what is new."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from nanovllm.engine.requests.request import Completion, Request
from nanovllm.frontend.core_messages import FirstToken, TokenLogprobs
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class EngineDeadError(RuntimeError):
    """The engine has ended, or is not there yet: requests that it computed are lost."""


class RequestFailed(RuntimeError):
    """The engine goes on, but this request is lost."""


class OutputStream:
    """The outputs of one request, for one consumer.

    `feed`, `end` and `fail` are called by whatever thread brings the engine's outputs; `next` in the consumer's event
    loop. A slow consumer misses nothing: what came meanwhile is one output, so a stream holds at most the request's
    own tokens.

    Args:
        request_id: what the user calls the request.
        abort: ends the request in the engine; its argument is a completion's index, or None for all.
    """

    def __init__(self, request: Request, request_id: str, abort: Callable[[int | None], None]) -> None:
        self.request = request
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.num_cached_tokens = 0
        self.queue_seconds: float | None = None
        self.failure: Exception | None = None
        self._abort = abort
        self._waiting: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        num = len(request.completions)
        self._sent_tokens, self._sent_text, self._sent_end = [0] * num, [0] * num, [False] * num
        self._prompt_logprobs_sent = False
        self.over = False
        """Whether the consumer has had everything."""
        self.listener: Callable[[], None] | None = None
        """Called in the event loop when there is something to `take`."""

    @property
    def started(self) -> bool:
        """Whether a first token has come."""
        return self.request.first_token_time is not None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.failure is not None or self.request.finished

    # ---------------------------------------------------------------------------------------- the engine's side

    def begin(self, first: FirstToken) -> None:
        """Take the facts that come with the first token."""
        with self._lock:
            self.num_cached_tokens, self.queue_seconds = first.num_cached_tokens, first.queue_seconds
            if first.prompt_logprobs is not None:
                prompt = [None if row is None else self._logprobs(row) for row in first.prompt_logprobs]
                self.request.prompt_logprobs = prompt

    def feed(
        self, index: int, token_id: int, logprobs: TokenLogprobs | None, end: tuple[str, int | str | None] | None
    ) -> bool:
        """Take a token of a completion; returns whether the completion has ended.

        end: (finish reason, stop reason) if it is the last token.
        """
        with self._lock:
            completion = self.request.completions[index]
            seq = completion.seq
            if seq.finished or self.failure is not None:
                return False
            seq.token_ids.append(token_id)
            if end is not None:
                seq.end(*end)
            if logprobs is not None and completion.logprobs is not None:
                completion.logprobs.append(self._logprobs(logprobs))
            stop = completion.append(token_id)
            if stop is not None:
                ended_here = not seq.finished
                if ended_here or seq.finish_reason == "length":
                    seq.end("stop", stop)
                if ended_here:
                    self._abort(index)
            ended = seq.finished
            if ended or self.request.first_token_time is None:
                self.request.record_token_time()
            return ended

    def end(self, index: int, reason: str, stop_reason: int | str | None) -> None:
        """A completion ended without a further token."""
        with self._lock:
            seq = self.request.completions[index].seq
            if not seq.finished:
                seq.end(reason, stop_reason)
                self.request.record_token_time()

    def fail(self, error: Exception) -> None:
        """The request is lost."""
        with self._lock:
            if not self.request.finished:
                self.failure = self.failure or error

    def wake(self) -> None:
        """Called in the consumer's event loop when there is news."""
        if self.listener is not None:
            self.listener()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # ---------------------------------------------------------------------------------------- the consumer's side

    async def next(self) -> RequestOutput | None:
        """What is new since the last call, as soon as there is something; None: that was all.

        Raises:
            EngineDeadError, RequestFailed, ValueError: the request is lost or was refused.
        """
        while not self.over:
            output = self.take()
            if output is not None or self.over:
                return output
            self._waiting = self.loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return None

    def take(self) -> RequestOutput | None:
        """What is new since the last call; None: nothing yet, or if `over`, nothing more.

        Raises:
            As `next`.
        """
        with self._lock:
            output = None if self.over else self._take()
        if output is None and self.failure is not None and not self.over:
            self.over = True
            raise self.failure
        return output

    def close(self) -> None:
        """No more is wanted: abort what runs. It never waits, so it may be called in a task that is cancelled."""
        self.over = True
        if not self.request.finished:  # also after `fail`: the engine may know nothing of that
            self._abort(None)

    def _take(self) -> RequestOutput | None:
        outputs = [piece for c in self.request.completions if (piece := self._piece(c)) is not None]
        if not outputs:
            return None
        # The last output is one in which a completion ends.
        finished = any(piece.finish_reason is not None for piece in outputs) and self.request.finished
        self.over = finished
        prompt_logprobs = None
        if not self._prompt_logprobs_sent:
            self._prompt_logprobs_sent, prompt_logprobs = True, self.request.prompt_logprobs
        metrics = RequestMetrics(num_cached_tokens=self.num_cached_tokens, arrival_time=self.request.arrival_date)
        if finished:
            metrics.time_to_first_token = self.request.seconds_until(self.request.first_token_time)
            metrics.total_time = self.request.seconds_until(self.request.finish_time)
        return RequestOutput(
            self.request_id, self.request.prompt, self.request.prompt_token_ids, outputs, finished, prompt_logprobs,
            metrics,
        )  # fmt: skip

    def _piece(self, completion: Completion) -> CompletionOutput | None:
        seq = completion.seq
        index = seq.index
        sent = self._sent_tokens[index]
        num_tokens = len(seq.token_ids) - seq.prompt_len
        if num_tokens == sent and (self._sent_end[index] or not seq.finished):
            return None
        text = completion.settled_text
        piece = text[self._sent_text[index] :]
        self._sent_tokens[index], self._sent_text[index] = num_tokens, max(len(text), self._sent_text[index])
        self._sent_end[index] = seq.finished
        return CompletionOutput(
            index, piece, seq.token_ids[seq.prompt_len + sent :], seq.finish_reason, seq.stop_reason,
            None if completion.logprobs is None else completion.logprobs[sent:],
        )  # fmt: skip

    def _logprobs(self, row: TokenLogprobs) -> dict[int, Logprob]:
        text: Callable[[int], str | None] = self.request.token_text or (lambda token_id: None)
        return {t: Logprob(p, rank, text(t)) for t, p, rank in zip(*row)}
