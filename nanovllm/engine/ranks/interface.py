"""Several ranks that run one engine's steps: each has a scheduler of its own, and all get the same requests.

Rank 0 is the user's process. Before a step it sends the others what came since the last one: requests and aborts.
Everything else follows from these on every rank alike: the schedule, the tokens (equal logits, seeds and positions),
and the ends of sequences. So ranks exchange nothing else but what the layers sum up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.requests.prompts import CheckedPrompt
from nanovllm.engine.requests.request import InboxEntry, Request
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams

T = TypeVar("T")
CHECK_VARIABLE = "NANOVLLM_CHECK"
_CHECK_STEPS = 16


class Ranks:
    """A single rank, which exchanges nothing; and what an engine asks of several."""

    rank = 0
    failure: str | None = None
    """Why a rank failed, after which no step can run; None: no rank has failed."""

    def when_failed(self, call: Callable[[], None]) -> None:
        """Call `call` in another thread when a rank fails, so that an engine without work finds out."""

    def make_on_all(self, make: Callable[[], T]) -> T:
        """What `make` returns, which is called on every rank with the group as `current_group()`."""
        return make()

    def run_step(self, step: Callable[[], T]) -> T:
        """What `step` returns, which runs on every rank."""
        return step()

    def send_inbox(self, entries: Sequence[InboxEntry]) -> None:
        """Start the next step on the other ranks: send them what this rank applies before it schedules."""

    def call_on_others(self, method: str) -> None:
        """Call a method of the engine on the other ranks, between steps."""

    def compare_schedules(self, step: ScheduledStep | None) -> None:
        """A step was scheduled: with NANOVLLM_CHECK=1 an error if another rank has scheduled other steps."""

    def close(self) -> None:
        """End the other ranks."""


class RequestRecord(NamedTuple):
    """What the ranks need to make the same request."""

    request_id: int
    prompt: CheckedPrompt
    params: SamplingParams
    seed: int
    offline: bool
    with_text: bool

    @classmethod
    def of(cls, request: Request) -> RequestRecord:
        prompt = CheckedPrompt(None, request.prompt_token_ids, request.cache_salt)
        with_text = request.token_text is not None
        return cls(request.request_id, prompt, request.params, request.seed, request.offline, with_text)


class AbortRecord(NamedTuple):
    """Completions of a request that are to end."""

    request_id: int
    indices: list[int]


class ScheduleDigest:
    """A hash over all steps so far, with the tokens that they began from."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.steps = 0

    def add(self, step: ScheduledStep | None) -> None:
        self.steps += 1
        for part in () if step is None else step.parts:
            seq = part.seq
            told = (seq.seq_id, seq.index, part[1:], seq.block_table, len(seq.token_ids), seq.token_ids[-1])
            self._hash.update(repr(told).encode())

    @property
    def is_due(self) -> bool:
        """Whether the ranks compare their digests now."""
        return self.steps % _CHECK_STEPS == 0

    @property
    def value(self) -> tuple[int, str]:
        return self.steps, self._hash.hexdigest()


def still_seconds(config: EngineConfig, device: torch.device) -> float | None:
    """If all ranks wait for this time, they hang. None: no limit, since collectives of a CPU time out by themselves."""
    return config.rank_timeout / 2 if device.type == "cuda" else None
