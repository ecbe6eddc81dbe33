"""What a request returns. Field names are vLLM's; `output["text"]` works as in nano-vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from nanovllm.chat.deltas import Message


@dataclass(frozen=True)
class Logprob:
    """One candidate token."""

    logprob: float
    """Natural logarithm of the probability under the raw logits: before bias, penalties and temperature."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""


@dataclass
class CompletionOutput:
    """One of a request's `n` completions."""

    index: int
    """Which of them, from 0."""
    text: str
    """The output without the prompt; empty without a tokenizer."""
    token_ids: list[int]
    """Of the output, an end token included."""
    finish_reason: str | None = None
    """"stop" (end token or stop string), "length", "abort", or None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's own end token."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token: itself first, then the most likely tokens. None if `SamplingParams.logprobs` is None."""

    lora_request: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    routed_experts: ClassVar[None] = None
    """vLLM's; always None here, as are those of `RequestOutput`."""

    message: Message | None = None
    """Only from `LLM.chat`: the text taken apart into content, reasoning and tool calls."""

    def finished(self) -> bool:
        """As in vLLM: whether the completion has ended."""
        return self.finish_reason is not None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the output tokens' log-probabilities, or None without `SamplingParams.logprobs`."""
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for row, token in zip(self.logprobs, self.token_ids))


@dataclass
class RequestMetrics:
    """When a request came, got its first token and ended. None: not yet."""

    time_to_first_token: float | None = None
    """Seconds from the request's arrival."""
    total_time: float | None = None
    """Seconds from the request's arrival until its last completion ended."""
    num_cached_tokens: int = 0
    """As `RequestOutput.num_cached_tokens`."""
    arrival_time: float = 0.0
    """Seconds since the epoch, as `time.time()`."""

    @property
    def first_token_latency(self) -> float | None:
        """vLLM's name of `time_to_first_token`."""
        return self.time_to_first_token

    @property
    def first_token_time(self) -> float | None:
        """Seconds since the epoch."""
        return None if self.time_to_first_token is None else self.arrival_time + self.time_to_first_token

    @property
    def finished_time(self) -> float | None:
        """Seconds since the epoch."""
        return None if self.total_time is None else self.arrival_time + self.total_time


@dataclass
class RequestOutput:
    """A request's prompt and completions. `output["text"]` and `output["token_ids"]` are the first completion's."""

    request_id: str
    """The engine's number, as a text like vLLM's, or the id that `AsyncLLM.generate` was given."""
    prompt: str | None
    """The prompt's text; None if only token ids were passed."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One for each of `n`, by index."""
    finished: bool
    """Whether all completions have ended."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, as `CompletionOutput.logprobs`; the first token, which nothing predicts, has None."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache (of the first completion)."""
        return self.metrics.num_cached_tokens

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that there is

        def __getattr__(self, name: str) -> Any:
            if name in _COMPLETION_FIELDS:
                raise AttributeError(f"a RequestOutput has no {name}; use output.outputs[0].{name} or output[{name!r}]")
            raise AttributeError(f"'RequestOutput' object has no attribute {name!r}")

    def __getitem__(self, key: str) -> Any:
        if key in _COMPLETION_FIELDS:
            return getattr(self.outputs[0], key)
        if key in _REQUEST_FIELDS:
            return getattr(self, key)
        raise KeyError(f"{key!r}; an output has {', '.join(sorted(_COMPLETION_FIELDS | _REQUEST_FIELDS))}")

    def keys(self) -> list[str]:
        """What `output[...]` takes, sorted."""
        return sorted(_COMPLETION_FIELDS | _REQUEST_FIELDS)


_COMPLETION_FIELDS = {"cumulative_logprob", *(f.name for f in fields(CompletionOutput))}
_REQUEST_FIELDS = {"num_cached_tokens", *(f.name for f in fields(RequestOutput))}
