"""Decode steps that repeat: the same sequences, each one token further, with little work a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep


class DecodeRun:
    """The continuations of a decode step, until the scheduler has to decide something.

    A run knows in advance when each sequence begins a block or reaches its greatest length. A step looks only at these
    sequences. When one sequence needs a block, every sequence that needs one soon gets its block too, so that the host
    sends new blocks to the device once in many steps. No sequence is preempted for a reserved block, and no sequence
    gets blocks beyond its greatest length. A reservation leaves so many blocks free that every sequence could still get
    the blocks of as many tokens.

    Args:
        step: the first step, of kind DECODE, with all running sequences.
        reserve_tokens_ahead: tokens beyond the step's for which blocks are reserved; 0: none.
    """

    def __init__(self, step: ScheduledStep, blocks: BlockManager, reserve_tokens_ahead: int) -> None:
        self.step = step
        self._blocks = blocks
        self._reserve_tokens_ahead = reserve_tokens_ahead
        self._last_offset = min(seq.max_len - seq.num_tokens for seq in step.sampling)
        """Continuations until a sequence reaches its greatest length."""
        self._block_starts: defaultdict[int, list[Sequence]] = defaultdict(list)
        """By continuation: the sequences whose token is the first of a block. Each sequence is there once, for its next
        block. With 30 tokens computed and blocks of 16, two continuations fill a block, and the third begins one."""
        for seq in step.sampling:
            left_in_block = -seq.num_computed_tokens % blocks.block_size
            self._block_starts[left_in_block + 1].append(seq)
        self._reserve(step.sampling)  # this step differs from the last one: the host sends block tables anyway

    def next(self) -> ScheduledStep | None:
        """The next step of the run, or None if the scheduler has to decide something."""
        if self.step.offset == self._last_offset:
            return None
        step, block_size = self.step.next(), self._blocks.block_size
        beginning = self._block_starts.pop(step.offset, ())
        any_lacks_block = False
        for seq in beginning:
            if len(seq.block_table) * block_size == seq.num_computed_tokens:
                any_lacks_block = True
                if not self._blocks.grow(seq, seq.num_computed_tokens + 1):
                    return None  # the scheduler has to preempt one; sequences that got blocks in this loop keep them
        for seq in step.sampling:
            seq.num_computed_tokens += 1
            seq.num_pending += 1
        for seq in beginning:
            self._blocks.register(seq, seq.num_computed_tokens)
            self._block_starts[step.offset + block_size].append(seq)
        if any_lacks_block:
            for offset in range(step.offset + 1, step.offset + 1 + self._reserve_tokens_ahead):
                self._reserve(self._block_starts.get(offset, ()))
        self.step = step
        return step

    def _reserve(self, seqs: Iterable[Sequence]) -> None:
        """Give sequences the blocks of their next tokens."""
        ahead = self._reserve_tokens_ahead
        if not ahead:
            return
        keep_free = len(self.step.sampling) * self._blocks.blocks_needed(ahead)
        for seq in seqs:
            num_tokens = min(seq.num_computed_tokens + ahead, seq.max_len - 1)  # the last token is not computed
            has_blocks = num_tokens <= len(seq.block_table) * self._blocks.block_size
            if not has_blocks and not self._blocks.grow(seq, num_tokens, keep_free):
                break
