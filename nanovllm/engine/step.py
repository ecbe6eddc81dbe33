"""What the scheduler decides: a step, and the part of each sequence in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence


class StepKind(Enum):
    """What a step computes. It decides how the step can be run."""

    DECODE = "decode"
    """The last token of each sequence."""
    PIGGYBACKED = "piggybacked"
    """Decodes, and pieces of prompts that only leave their keys and values: no piece ends its prompt, no piece wants
    log-probabilities, and neither kind attends to what the other writes in this step."""
    MIXED = "mixed"
    """Any other step with pieces of prompts."""


class StepBudget(NamedTuple):
    """The tokens that a step may take."""

    num_tokens: int
    """Tokens of the whole step."""
    piggybacked: int | None = None
    """Prompt tokens that are piggybacked on the step's decodes; None: prompts are computed at full speed."""
    max_pieces: int = 0
    """Prompts that may be piggybacked."""


class ScheduledSequence(NamedTuple):
    """One sequence's part in a step: its tokens start .. start + num_tokens - 1."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the part reaches the sequence's end, so that the next token is sampled."""
    seq_slot: int
    admitted: bool
    """Whether the sequence takes its seq_slot in this step: the seq_slot's device state must be set up."""

    @property
    def decodes(self) -> bool:
        """Whether the part is the sequence's last token, and wants no other row of logits."""
        return (
            self.num_tokens == 1
            and self.samples
            and (self.start >= self.seq.prompt_len or self.seq.params.prompt_logprobs is None)
        )


@dataclass(frozen=True)
class ScheduledStep:
    """One step; single-token parts come first.

    A *continuation* is a step of the same decodes as the step before it, each one token further. It is described by the
    first step of its run and the number of steps since, so that making it costs the same for any batch.
    """

    first_parts: tuple[ScheduledSequence, ...]
    """The parts of the first step of the run."""
    kind: StepKind
    offset: int = 0
    """Steps since the run's first one."""

    @classmethod
    def of(cls, parts: tuple[ScheduledSequence, ...], piggyback: bool = False) -> ScheduledStep:
        """A step of these parts. piggyback: make it of kind PIGGYBACKED if its parts allow it."""
        if all(part.decodes for part in parts):
            return cls(parts, StepKind.DECODE)
        piggyback = piggyback and any(part.samples for part in parts)
        for part in parts:
            if part.samples:
                piggyback = piggyback and part.decodes and not part.admitted
            else:
                piggyback = piggyback and part.seq.params.prompt_logprobs is None
        return cls(parts, StepKind.PIGGYBACKED if piggyback else StepKind.MIXED)

    @property
    def continues(self) -> bool:
        return self.offset > 0

    @cached_property
    def parts(self) -> tuple[ScheduledSequence, ...]:
        if not self.offset:
            return self.first_parts
        return tuple(
            ScheduledSequence(p.seq, p.start + self.offset, 1, True, p.seq_slot, False) for p in self.first_parts
        )

    @cached_property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that get a token, in the order of `sampling_parts`."""
        return tuple(p.seq for p in self.first_parts if p.samples)

    @cached_property
    def sampling_parts(self) -> tuple[ScheduledSequence, ...]:
        """The parts that sample; in a step of kind DECODE or PIGGYBACKED these are its decodes."""
        if self.kind is StepKind.DECODE:
            return self.parts
        return tuple(p for p in self.parts if p.samples)

    @cached_property
    def pieces(self) -> tuple[ScheduledSequence, ...]:
        """The parts that do not sample: pieces of prompts."""
        return tuple(p for p in self.parts if not p.samples)

    def next(self) -> ScheduledStep:
        """The continuation of this step."""
        step = ScheduledStep(self.first_parts, self.kind, self.offset + 1)
        step.__dict__["sampling"] = self.sampling  # the same sequences: no need to collect them again
        return step

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.first_parts)
