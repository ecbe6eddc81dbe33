"""What the scheduler decides: a step, and each sequence's part in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """One sequence's part in a step: compute tokens start .. start + num_tokens - 1, and maybe sample the next."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the step reaches the sequence's end, so that its last token's logits give a new token."""
    slot: int
    admitted: bool
    """Whether the sequence takes its slot in this step, so that the slot's device state must be set up."""

    @property
    def decodes(self) -> bool:
        """Whether the part is the sequence's last token alone, and of the prompt's logits nobody wants more than its."""
        return (
            self.num_tokens == 1
            and self.samples
            and (self.start >= self.seq.prompt_len or self.seq.params.prompt_logprobs is None)
        )


@dataclass(frozen=True)
class ScheduledStep:
    """Everything of one step; single-token parts come first.

    A *continuation* is a step of the same decodes as the step before it, each one token further. It is described by the
    first step of its run and how many steps have passed since, so that it costs nothing in proportion to the batch.
    """

    first: tuple[ScheduledSequence, ...]
    """The parts of the run's first step."""
    offset: int = 0
    """Steps since then."""

    @property
    def continues(self) -> bool:
        return self.offset > 0

    @cached_property
    def parts(self) -> tuple[ScheduledSequence, ...]:
        if not self.offset:
            return self.first
        return tuple(ScheduledSequence(p.seq, p.start + self.offset, 1, True, p.slot, False) for p in self.first)

    @cached_property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in the order of their parts."""
        return tuple(p.seq for p in self.first if p.samples)

    @cached_property
    def decodes_only(self) -> bool:
        return self.continues or all(p.decodes for p in self.first)

    @cached_property
    def decoding(self) -> ScheduledStep:
        """Its decodes alone."""
        return self if self.decodes_only else ScheduledStep(tuple(p for p in self.first if p.samples))

    @cached_property
    def riding(self) -> ScheduledStep | None:
        """The pieces of prompts that can ride on its decodes: none of them ends, nobody wants log-probabilities of them, and
        no decode attends to what they write, nor they to what a decode does.

        None if there are none, or if it is not so.
        """
        riders = tuple(p for p in self.first if not p.samples)
        if not riders or len(riders) == len(self.first):
            return None
        if any(p.seq.params.prompt_logprobs is not None for p in riders):
            return None
        return ScheduledStep(riders) if all(p.decodes and not p.admitted for p in self.first if p.samples) else None

    def next(self) -> ScheduledStep:
        """The continuation of this step."""
        step = ScheduledStep(self.first, self.offset + 1)
        step.__dict__["sampling"] = self.sampling  # the same sequences: no need to collect them again
        return step

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.first)

    @property
    def num_decodes(self) -> int:
        return sum(p.num_tokens == 1 for p in self.first)
