"""What goes between an engine that runs steps and the front end that knows texts. All of it can be MessagePack.

A *completion key* is `request key * MAX_N + index of the completion`. A message has columns instead of records, since
most steps bring one token for each of hundreds of completions and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from nanovllm.engine.cache_size import CacheSize
from nanovllm.engine.requests.prompts import RAISE_MAX_MODEL_LEN
from nanovllm.sampling_params import MAX_N, SamplingParams

KEYS_PER_FRONT_END = 1 << 36
"""Request keys of front end i are from i times this number on, so that all front ends may get every message."""


def completion_key(request_key: int, index: int) -> int:
    return request_key * MAX_N + index


def split_key(key: int) -> tuple[int, int]:
    """(request key, index of the completion)"""
    return divmod(key, MAX_N)


class StartRequest(NamedTuple):
    """A checked request."""

    key: int
    """Unique among the requests of all front ends."""
    token_ids: list[int]
    params: dict[str, Any]
    """As `params_to_send` makes it."""
    seed: int
    cache_salt: str | None = None
    name: str | None = None
    """What its client calls it, for logs."""
    client: str = ""
    """Whose request it is: clients take turns in having new grammars compiled."""


class AbortRequest(NamedTuple):
    """End a request, or one completion of it. A request that is not known, or has ended, is not an error."""

    key: int
    completion: int | None = None
    """The completion's index; None: all of them."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the position's own token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class FirstToken(NamedTuple):
    """Facts that are known when a request gets its first token."""

    key: int
    num_cached_tokens: int
    queue_seconds: float
    """From the engine's receipt of the request to its admission."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_prompt_tokens: int = 0


class CompletionEnd(NamedTuple):
    key: int
    """A completion key."""
    reason: str
    stop_reason: int | str | None = None


class EngineStats(NamedTuple):
    """The engine after a step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """The share of the cache's blocks that sequences hold."""
    num_preemptions: int = 0
    """Since the engine started."""
    step_seconds: float = 0.0
    """From one result to the next, while the engine had work."""
    has_work: bool = False


class StepOutputs(NamedTuple):
    """What came of a step: token i belongs to the completion keys[i]."""

    stats: EngineStats
    keys: list[int] = []
    token_ids: list[int] = []
    first: list[FirstToken] = []
    ended: list[CompletionEnd] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(completion key, the log-probabilities of its token in this step)"""
    failed: list[tuple[int, str, str]] = []
    """Requests that ended with an error: (request key, "refused" or "lost", what to tell the user)."""


Deliver = Callable[[StepOutputs], None]
Died = Callable[[str], None]
"""Called when an engine has ended by itself, with the reason."""


class EngineInfo(NamedTuple):
    """What a front end must know of an engine."""

    model: str
    """The model's name or path, as it was passed."""
    tokenizer_path: str | None
    """A directory or a .gguf file; None: the engine serves token ids."""
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    num_blocks: int
    block_size: int
    device: str
    seed: int | None
    """The seed from which seeds are drawn for requests that bring none."""
    model_len: int = 0
    """The longest sequence of the model, which may be longer than what is served."""
    cache_bytes: int = 0
    """Of the KV cache on each device."""
    num_devices: int = 1
    """Devices that share the model."""
    sampling_defaults: dict[str, Any] = {}
    """Of requests that do not set these parameters of `SamplingParams`."""
    sampling_source: str = ""
    """These defaults in words, and where they are from; empty if there are none."""
    first_key: int = 0
    """Of this front end's requests."""
    remedy: str = RAISE_MAX_MODEL_LEN
    """What to do with a prompt that is too long."""

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(self.num_blocks, self.block_size, self.cache_bytes, self.max_model_len, self.num_devices)

    @property
    def context(self) -> str:
        """The longest sequence in words."""
        of_model = f" of the model's {self.model_len:,}" if self.max_model_len < self.model_len else ""
        return f"context {self.max_model_len:,}{of_model} tokens"

    def of_front_end(self, number: int) -> EngineInfo:
        """The same for one of several front ends, which draws seeds of its own."""
        seed = None if self.seed is None else self.seed + number
        return self._replace(seed=seed, first_key=number * KEYS_PER_FRONT_END)


def params_to_send(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults, without what the front end does itself: stop strings and text."""
    given = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    plain = _DEFAULTS | {"stop": given["stop"], "include_stop_str_in_output": given["include_stop_str_in_output"]}
    changed = {name: value for name, value in given.items() if name not in plain or value != plain[name]}
    # A number above all limits means no limit, and MessagePack has integers of 64 bits.
    return {name: min(value, _MOST) if isinstance(value, int) else value for name, value in changed.items()}


_MOST = 2**63 - 1
_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
