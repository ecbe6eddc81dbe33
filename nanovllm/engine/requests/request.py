"""A user's request: one prompt, its `n` completions, and their outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from nanovllm.engine.logit_rules import LogitRules
from nanovllm.engine.requests.detokenizer import Detokenizer, TextDecoder
from nanovllm.engine.requests.prompts import CheckedPrompt
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.constraint import TokenConstraint


class Completion:
    """One sequence of a request, and its text.

    Text is decoded token by token only for streams and stop strings, since that costs host time; otherwise once, at the
    end.
    """

    def __init__(self, seq: Sequence, decoder: TextDecoder | None, incremental: bool) -> None:
        params = seq.params
        assert isinstance(params.stop, tuple)  # SamplingParams makes it one
        self.seq = seq
        self._decoder = decoder
        self._detokenizer: Detokenizer | None = None
        if decoder is not None and (incremental or params.stop):
            self._detokenizer = Detokenizer(
                decoder, params.skip_special_tokens, params.stop, params.min_tokens, params.include_stop_str_in_output
            )
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.needs_every_token = self._detokenizer is not None or self.logprobs is not None
        """Whether the engine processes each token when it is read, not only the last one."""

    def constrain(self, constraint: TokenConstraint) -> None:
        """Before the first step: only what `constraint` allows may be sampled."""
        self.seq.constraint = constraint
        self.needs_every_token = True

    def append(self, token_id: int) -> str | None:
        """Take a sampled token; returns a stop string if the text now ends with one."""
        if self._detokenizer is None:
            return None
        ended_by_token = self.seq.finished and self.seq.finish_reason == "stop"
        if ended_by_token and not self.seq.params.include_stop_str_in_output:
            return self._detokenizer.finish()  # the end token itself is not part of the text
        stop = self._detokenizer.append(token_id)
        if stop is None and self.seq.finished:
            stop = self._detokenizer.finish()
        return stop

    @property
    def settled_text(self) -> str:
        """The text so far, less what a stop string may still take back; empty without a tokenizer."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.text
        return text if self.seq.finished else text[: self._detokenizer.settled_length]

    @property
    def text(self) -> str:
        if self._decoder is None:
            return ""
        if self._detokenizer is not None:
            return self._detokenizer.text
        params = self.seq.params
        token_ids = self.seq.output_token_ids
        if self.seq.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self._decoder.decode(token_ids, params.skip_special_tokens)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.seq.index,
            text=self.text,
            token_ids=self.seq.output_token_ids,
            finish_reason=self.seq.finish_reason,
            stop_reason=self.seq.stop_reason,
            logprobs=self.logprobs,
        )


class Request:
    """One prompt and its completions. Made by `LLMEngine.make_request`.

    Args:
        request_id: unique in the engine; sequence ids follow from it.
        seed: the seed of the first completion's draws; the others count up from it.
        decoder: None: the request has no text.
        incremental: keep the text current while tokens come, for streaming.
        logit_rules: the bias and the bad words of `params`.

    Attributes:
        offline: only the time of the request's end matters, not that of its first token.
        listener: called with the request by the thread that runs the engine's steps: when a completion ended, when the
            request was lost, and for an incremental request when it got a token. It must be quick and must not raise.
        name: what its client calls it, for logs; None: it has no name but `request_id`.
        client: the name of the client that sent it, if the server distinguishes clients.
        failure: what a failed step raised, if the request was lost by it.
        arrival_time, first_token_time, finish_time: on the clock `time.perf_counter`.
        arrival_date: seconds since the epoch.
    """

    def __init__(
        self,
        request_id: int,
        prompt: CheckedPrompt,
        params: SamplingParams,
        seed: int,
        decoder: TextDecoder | None,
        incremental: bool,
        logit_rules: LogitRules | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt.text
        self.prompt_token_ids = prompt.token_ids
        self.cache_salt = prompt.cache_salt
        self.params = params
        self.seed = seed
        self.token_text = None if decoder is None else decoder.token_text
        self.incremental = incremental
        self.offline = False
        self.listener: Callable[[Request], None] | None = None
        self.failure: BaseException | None = None
        self.name: str | None = None
        self.client = ""
        self.arrival_time = time.perf_counter()
        self.arrival_date = time.time()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt.token_ids)
        self.completions = []
        for index in range(params.n):
            # The prompt's log-probabilities are the same for all completions: the first computes them.
            own = params if index == 0 or params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
            seq = Sequence(request_id, prompt.token_ids, own, (seed + index) % 2**64, index, prompt.cache_salt)
            seq.logit_rules = logit_rules
            self.completions.append(Completion(seq, decoder, incremental))

    @property
    def finished(self) -> bool:
        return all(c.seq.finished for c in self.completions)

    @property
    def num_output_tokens(self) -> int:
        return sum(c.seq.num_output_tokens for c in self.completions)

    @property
    def log_name(self) -> str:
        """What logs call it."""
        return str(self.request_id) if self.name is None else self.name

    def notify(self) -> None:
        """Call the listener."""
        if self.listener is not None:
            self.listener(self)

    def record_token_time(self) -> None:
        """A completion got a token now."""
        now = time.perf_counter()
        if self.first_token_time is None:
            self.first_token_time = now
        if self.finished:
            self.finish_time = now

    def output(self) -> RequestOutput:
        """The request as its user sees it, finished or not."""
        return RequestOutput(
            request_id=str(self.request_id),
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[c.output() for c in self.completions],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=RequestMetrics(
                time_to_first_token=self.seconds_until(self.first_token_time),
                total_time=self.seconds_until(self.finish_time),
                num_cached_tokens=self.completions[0].seq.num_cached_tokens or 0,
                arrival_time=self.arrival_date,
            ),
        )

    def seconds_until(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrival_time


class InboxEntry(NamedTuple):
    """What the next step does before it schedules: start a request, or abort completions of it."""

    request: Request
    aborted: list[Completion] | None = None
    """None: the request starts."""
