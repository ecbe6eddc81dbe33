"""What a request returns. Field names are vLLM's; `output["text"]` works as in nano-vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """One candidate token: its natural log-probability under the raw logits, its rank (1 is the most likely), its
    text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a request's `n` completions."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop" (end token or stop string), "length", "abort", or None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's own end token."""
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestMetrics:
    """Times in seconds, from the request's arrival."""

    time_to_first_token: float | None = None
    total_time: float | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache (of the first completion)."""


@dataclass
class RequestOutput:
    """A request's prompt and completions. `output["text"]` and `output["token_ids"]` are the first completion's."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __getitem__(self, key: str) -> Any:
        if key in _COMPLETION_FIELDS:
            return getattr(self.outputs[0], key)
        if key in _REQUEST_FIELDS:
            return getattr(self, key)
        raise KeyError(f"{key!r}; an output has {', '.join(sorted(_COMPLETION_FIELDS | _REQUEST_FIELDS))}")

    def keys(self) -> list[str]:
        return sorted(_COMPLETION_FIELDS | _REQUEST_FIELDS)


_COMPLETION_FIELDS = {f.name for f in fields(CompletionOutput)}
_REQUEST_FIELDS = {f.name for f in fields(RequestOutput)}
