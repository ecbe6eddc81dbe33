"""What the scheduler decides: a step, and the part of each sequence in it."""

from __future__ import annotations

from collections.abc import Iterable
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


@dataclass
class StepBudget:
    """What a step may still take. The scheduler takes from it sequence by sequence."""

    num_tokens: int
    """Tokens, of decodes and of prompts."""
    full_speed: bool = True
    """Whether a prompt may take all of them. False: prompts are piggybacked, within the two limits below."""
    num_piggybacked: int = 0
    """Tokens of prompts that may be piggybacked."""
    num_pieces: int = 0
    """Prompts of which a piece may be piggybacked."""

    def tokens_for(self, missing: int) -> int:
        """How many tokens the step takes of a sequence that has `missing` tokens to compute.

        A piggybacked prompt leaves its last token to a later step, where it is a decode. Of 50 tokens 49 are taken if
        60 can still be piggybacked, and 20 if 20 can.
        """
        if self.full_speed or missing == 1:
            return min(missing, self.num_tokens)
        if self.num_pieces == 0:
            return 0
        return min(missing - 1, self.num_piggybacked, self.num_tokens)

    def take(self, num_tokens: int, samples: bool) -> None:
        """The step takes these tokens of a sequence. samples: they are its last ones."""
        self.num_tokens -= num_tokens
        is_piece = not samples  # of a prompt, which ends in a later step
        if is_piece and not self.full_speed:
            self.num_piggybacked -= num_tokens
            self.num_pieces -= 1


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
    sampling: tuple[Sequence, ...]
    """The sequences that get a token, in the order of `sampling_parts`."""
    offset: int = 0
    """Steps since the run's first one."""

    @classmethod
    def of(cls, parts: tuple[ScheduledSequence, ...], piggyback: bool = False) -> ScheduledStep:
        """A step of these parts. piggyback: make it of kind PIGGYBACKED if its parts allow it."""
        if all(part.decodes for part in parts):
            kind = StepKind.DECODE
        elif piggyback and _can_piggyback(parts):
            kind = StepKind.PIGGYBACKED
        else:
            kind = StepKind.MIXED
        return cls(parts, kind, tuple(part.seq for part in parts if part.samples))

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
        return ScheduledStep(self.first_parts, self.kind, self.sampling, self.offset + 1)

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.first_parts)


def _can_piggyback(parts: Iterable[ScheduledSequence]) -> bool:
    """Whether some of the parts decode, and all others are pieces of prompts that can be piggybacked on these."""
    decodes = [part for part in parts if part.samples]
    pieces = [part for part in parts if not part.samples]
    return (
        bool(decodes)
        and all(part.decodes and not part.admitted for part in decodes)
        and all(piece.seq.params.prompt_logprobs is None for piece in pieces)
    )
