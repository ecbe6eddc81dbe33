"""Decode steps that repeat: the same sequences, each one token further, with as little work a step as possible."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep


class DecodeRun:
    """The continuations of a decode step, until something has to be decided.

    It knows in advance when a sequence will begin a block or reach its greatest length, so that a step looks only at
    these. Where one sequence needs a block, all that will need one soon get theirs too, so that the device hears of new
    blocks once in many steps. No sequence is preempted for a reserved block, none gets blocks beyond its greatest
    length, and as many blocks stay free as all sequences may need for so many tokens.

    Args:
        step: the first step, of kind DECODE, with all sequences that run.
        reserve_tokens_ahead: tokens that a sequence has blocks for beyond the step's, after blocks were reserved; 0:
            none are reserved.
    """

    def __init__(self, step: ScheduledStep, blocks: BlockManager, reserve_tokens_ahead: int) -> None:
        self.step = step
        self._blocks = blocks
        self._reserve_tokens_ahead = reserve_tokens_ahead
        self._last_offset = min(seq.max_len - seq.num_tokens for seq in step.sampling)
        """Continuations until a sequence reaches its greatest length."""
        self._block_starts: dict[int, list[Sequence]] = {}
        """By continuation: the sequences whose token is the first of a block. Each is there once, with its next
        block.
        """
        for seq in step.sampling:
            self._block_starts.setdefault(-seq.num_computed_tokens % blocks.block_size + 1, []).append(seq)
        self._reserve(step.sampling)  # the step differs from the one before it, so the device hears of something anyway

    def next(self) -> ScheduledStep | None:
        """The next step of the run, or None if something has to be decided."""
        if self.step.offset == self._last_offset:
            return None
        step, block_size = self.step.next(), self._blocks.block_size
        block_starts = self._block_starts.pop(step.offset, ())
        grows = False
        for seq in block_starts:
            if len(seq.block_table) * block_size == seq.num_computed_tokens:
                grows = True
                if not self._blocks.grow(seq, seq.num_computed_tokens + 1):
                    return None  # a sequence has to be preempted; those that have grown until here keep their blocks
        for seq in step.sampling:
            seq.num_computed_tokens += 1
            seq.num_pending += 1
        for seq in block_starts:
            self._blocks.register(seq)
            self._block_starts.setdefault(step.offset + block_size, []).append(seq)
        if grows:
            for offset in range(step.offset + 1, step.offset + 1 + self._reserve_tokens_ahead):
                self._reserve(self._block_starts.get(offset, ()))
        self.step = step
        return step

    def _reserve(self, seqs: Iterable[Sequence]) -> None:
        """Give sequences the blocks of their next tokens, as the class says."""
        ahead, block_size = self._reserve_tokens_ahead, self._blocks.block_size
        if not ahead:
            return
        spare = len(self.step.sampling) * -(-ahead // block_size)
        for seq in seqs:
            # The last token is not computed.
            num_tokens = min(seq.num_computed_tokens + ahead, seq.max_len - 1)
            if num_tokens > len(seq.block_table) * block_size and not self._blocks.grow(seq, num_tokens, spare):
                break
