"""A user's request: one prompt, its `n` completions, and what is said of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer, decode
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams


class Completion:
    """One sequence of a request, with its text as far as someone wants it before the end."""

    def __init__(self, seq: Sequence, tokenizer: Any, incremental: bool) -> None:
        params = seq.params
        self.seq = seq
        self._tokenizer = tokenizer
        # Decoding token by token costs host time, so only who streams or looks for stop strings pays for it.
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and (incremental or params.stop):
            self._detokenizer = Detokenizer(
                tokenizer, params.skip_special_tokens, params.stop, params.min_tokens, params.include_stop_str_in_output
            )
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []

    @property
    def is_watched(self) -> bool:
        """Whether every token has to be looked at as it comes."""
        return self._detokenizer is not None or self.logprobs is not None

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
        """The text so far, less what a stop string may still take back."""
        assert self._detokenizer is not None
        text = self._detokenizer.text
        return text if self.seq.finished else text[: self._detokenizer.settled_length]

    @property
    def text(self) -> str:
        if self._tokenizer is None:
            return ""
        if self._detokenizer is not None:
            return self._detokenizer.text
        params = self.seq.params
        token_ids = self.seq.output_token_ids
        if self.seq.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return decode(self._tokenizer, token_ids, params.skip_special_tokens)

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
    """One prompt and its completions. Made by `LLMEngine.add_request`.

    Args:
        request_id: unique in the engine; sequence ids follow from it.
        seed: of the first completion's draws; the others count up from it.
        incremental: keep the text current while tokens come, for streaming.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        tokenizer: Any,
        incremental: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt_token_ids)
        self.completions = []
        for index in range(params.n):
            # The prompt's log-probabilities are the same for all completions: the first computes them.
            own = params if index == 0 or params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
            seq = Sequence(request_id, prompt_token_ids, own, (seed + index) % 2**64, index)
            self.completions.append(Completion(seq, tokenizer, incremental))

    @property
    def finished(self) -> bool:
        return all(c.seq.finished for c in self.completions)

    @property
    def num_output_tokens(self) -> int:
        return sum(c.seq.num_output_tokens for c in self.completions)

    def note_token(self) -> None:
        """A completion got a token: keep the times."""
        now = time.perf_counter()
        if self.first_token_time is None:
            self.first_token_time = now
        if self.finished:
            self.finish_time = now

    def output(self) -> RequestOutput:
        """The request as its user sees it, finished or not."""
        since = lambda t: None if t is None else t - self.arrival_time  # noqa: E731
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[c.output() for c in self.completions],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=RequestMetrics(
                time_to_first_token=since(self.first_token_time),
                total_time=since(self.finish_time),
                num_cached_tokens=self.completions[0].seq.num_cached_tokens or 0,
            ),
        )
