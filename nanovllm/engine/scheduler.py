"""The scheduler: which sequences run in the next step, on how many tokens, in which cache blocks.

A step may mix sequences that decode (one token each) with pieces of prompts, under one token budget. Running sequences
go first, in the order of their admission; the rest of the budget admits waiting sequences. If a sequence needs a block
and none is free, the sequence admitted last is preempted: it gives up its blocks and is computed again later. Its
output is kept.

A step can be scheduled while the step before it is in flight. Blocks and seq_slots are given back as soon as the host
knows that a sequence has ended, even if a step in flight uses them: steps run in order on one stream, so the next owner
of a block writes to it later.

While no sequence comes, ends or lacks a block, steps repeat: the same sequences, each one token further (`DecodeRun`).

With piggybacked prefill (`engine/fast/piggyback.py`) a step of decodes takes a few prompt tokens as well, but never a
prompt's last token, which is a decode of the next step.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.decode_run import DecodeRun
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledSequence, ScheduledStep, StepBudget, StepKind

if TYPE_CHECKING:
    from nanovllm.engine.fast.piggyback import Piggyback


class Scheduler:
    """First come, first served, with preemption by recomputation.

    Args:
        block_manager: the KV cache's bookkeeping.
        max_num_seqs: the most sequences in a step, and the number of seq_slots.
        max_num_batched_tokens: the most tokens in a step.
        max_model_len: the longest prompt plus output; the cache must hold at least one such sequence.
        eos_token_ids: tokens that end a sequence unless its `ignore_eos` is set.
        piggyback: decides how many prompt tokens a step takes; None: as many as fit.
        reserve_tokens_ahead: see `DecodeRun`.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        piggyback: Piggyback | None = None,
        reserve_tokens_ahead: int = 0,
    ) -> None:
        assert block_manager.num_blocks >= block_manager.blocks_needed(max_model_len), "a lone sequence must fit"
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.piggyback = piggyback
        self.reserve_tokens_ahead = reserve_tokens_ahead
        self.num_preemptions = 0
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        """In the order of service. A dict, so that ending a waiting sequence takes constant time."""
        self.reset()

    def reset(self) -> None:
        """Begin anew, even in the middle of a decision: no sequence runs or waits for a step in flight.

        The sequences in `waiting` will be served; the caller must end all others.
        """
        self.running: list[Sequence] = []
        self._decode_run: DecodeRun | None = None
        self._head_lacks_blocks = False
        """Whether the first waiting sequence found too few free blocks, and none was given back since."""
        self._free_seq_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self.blocks.reset()
        self.waiting = OrderedDict.fromkeys(
            seq for seq in self.waiting if seq.status is SequenceStatus.WAITING and not seq.num_pending
        )
        for seq in self.waiting:  # one of them may have been about to run
            seq.block_table, seq.num_registered_blocks, seq.num_computed_tokens, seq.seq_slot = [], 0, 0, -1

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        if self.piggyback is not None and not self.has_unfinished:
            self.piggyback.first_sequence_added()
        seq.max_len = seq.params.most_tokens(seq.prompt_len, self.max_model_len)
        eos: frozenset[int] = frozenset() if seq.params.ignore_eos else self.eos_token_ids
        seq.stop_ids = eos.union(seq.params.stop_token_ids or ())
        self.waiting[seq] = None

    def schedule(self) -> ScheduledStep | None:
        """The next step; None: no sequence is left, or none can run before a result in flight is read."""
        if self._decode_run is not None and not self._may_admit():
            step = self._decode_run.next()
            if step is not None:
                return step
        self._decode_run = None
        running = [seq for seq in self.running if not self._at_end(seq)]
        budget = self._budget(running)
        parts = self._schedule_running(running, budget) + self._admit(budget)
        if not parts:
            return None
        parts.sort(key=lambda part: part.num_tokens != 1)  # single tokens first; else in this order
        step = ScheduledStep.of(tuple(parts), piggyback=not budget.full_speed)
        if len(parts) == len(self.running) and step.kind is StepKind.DECODE:
            self._decode_run = DecodeRun(step, self.blocks, self.reserve_tokens_ahead)
        return step

    def _may_admit(self) -> bool:
        """Whether the first waiting sequence could run, as far as is known without a look at its cached prefix."""
        return bool(self.waiting and self._free_seq_slots and not self._head_lacks_blocks)

    @staticmethod
    def _at_end(seq: Sequence) -> bool:
        """Whether the sequence's last token is in flight, so that it needs no further step."""
        return bool(seq.num_pending) and seq.num_tokens >= seq.max_len

    def _budget(self, running: list[Sequence]) -> StepBudget:
        if self.piggyback is None:
            return StepBudget(self.max_num_batched_tokens)
        waiting = self.waiting if self._may_admit() else ()
        return self.piggyback.budget(running, waiting, self.max_num_batched_tokens)

    def _schedule_running(self, running: list[Sequence], budget: StepBudget) -> list[ScheduledSequence]:
        """Parts of running sequences, in the order of their admission. If blocks are missing, the last is preempted.

        No sequence that has a part already is preempted: those admitted last go first, at the latest `seq` itself, and
        it was admitted after all that have parts. One at its end (`_at_end`), which is not in `running`, may be.
        """
        parts: list[ScheduledSequence] = []
        for seq in running:
            if seq.status is not SequenceStatus.RUNNING or not budget.num_tokens:
                break  # it was preempted for a sequence before it, or the budget is used up
            num_tokens = budget.tokens_for(seq.num_tokens - seq.num_computed_tokens)
            if num_tokens == 0:
                continue
            while not self.blocks.grow(seq, seq.num_computed_tokens + num_tokens):
                if self._preempt_last() is seq:
                    return parts  # it was the last one itself
            parts.append(self._schedule_part(seq, num_tokens, budget))
        return parts

    def _admit(self, budget: StepBudget) -> list[ScheduledSequence]:
        """Parts of waiting sequences in their order, while budget, seq_slots and blocks suffice."""
        parts = []
        while self.waiting and self._free_seq_slots and budget.num_tokens:
            seq = next(iter(self.waiting))
            if seq.num_pending:
                break  # preempted with a token in flight: the host does not know all of its tokens yet
            prefix = self.blocks.match_prefix(seq)
            start = len(prefix) * self.blocks.block_size
            num_tokens = budget.tokens_for(seq.num_tokens - start)
            if num_tokens == 0:
                break
            # A piggybacked prompt begins when all of it fits: otherwise decodes that grow would soon preempt it.
            must_fit = start + num_tokens if budget.full_speed else seq.num_tokens
            if not self.blocks.fits(prefix, must_fit):
                self._head_lacks_blocks = True
                break
            self.blocks.admit(seq, prefix, start + num_tokens)
            del self.waiting[seq]
            seq.status = SequenceStatus.RUNNING
            seq.seq_slot = self._free_seq_slots.pop()
            seq.num_computed_tokens = start
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens, seq.admitted_time = start, time.perf_counter()
            self.running.append(seq)
            parts.append(self._schedule_part(seq, num_tokens, budget, admitted=True))
        return parts

    def _schedule_part(
        self, seq: Sequence, num_tokens: int, budget: StepBudget, admitted: bool = False
    ) -> ScheduledSequence:
        """The sequence's next tokens as a part of the step, taken from the budget."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens += num_tokens
        samples = seq.num_computed_tokens == seq.num_tokens
        if samples:
            seq.num_pending += 1
        # The sequences that are admitted next may share the blocks that this part completes, unless it is a single
        # token or piggybacked: then one kernel stores and attends, and theirs could read before this one has stored.
        shared_at_once = num_tokens > 1 and budget.full_speed
        self.blocks.register(seq, seq.num_computed_tokens if shared_at_once else start)
        budget.take(num_tokens, samples)
        return ScheduledSequence(seq, start, num_tokens, samples, seq.seq_slot, admitted)

    def _preempt_last(self) -> Sequence:
        """Take the blocks of the sequence admitted last. It waits before all others; the blocks are computed again."""
        seq = self.running.pop()
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1
        return seq

    def update(self, step: ScheduledStep, token_ids: list[int]) -> list[Sequence]:
        """Append the tokens that a step sampled, one for each part that samples, in order.

        Returns the sequences that grew; some of them have finished. Tokens of sequences that had finished are dropped.
        """
        grown = []
        assert len(step.sampling) == len(token_ids)
        finished = SequenceStatus.FINISHED
        for seq, token in zip(step.sampling, token_ids):
            seq.num_pending -= 1
            if seq.status is finished:
                continue
            tokens = seq.token_ids
            tokens.append(token)
            grown.append(seq)
            if token in seq.stop_ids or len(tokens) >= seq.max_len:
                self._stop_by_token(seq, token)
        return grown

    def _stop_by_token(self, seq: Sequence, token: int) -> None:
        """Finish the sequence if its newest token ends it, or if it has its greatest length."""
        params = seq.params
        # A constraint allows an end token before `min_tokens` only where it allows nothing else.
        may_end = seq.num_output_tokens >= params.min_tokens or seq.constraint is not None
        if token in seq.stop_ids and may_end:
            by_eos = token in self.eos_token_ids and not params.ignore_eos
            self.finish(seq, "stop", None if by_eos else token)
        elif len(seq.token_ids) >= seq.max_len:
            self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence and take back its blocks and seq_slot. It may wait, run, have a step in flight, or not be
        added.
        """
        if seq.finished:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.blocks.register(seq, seq.num_computed_tokens)
            self._release(seq)
        elif seq in self.waiting:
            del self.waiting[seq]
            self._head_lacks_blocks = False  # the next one may need fewer blocks
        if self.piggyback is not None:
            self.piggyback.sequence_ended(seq, reason)
        seq.end(reason, stop_reason)

    def _release(self, seq: Sequence) -> None:
        """Take back the blocks and the seq_slot of a sequence that ran."""
        self._decode_run = None
        self._head_lacks_blocks = False
        self.blocks.free(seq)
        self._free_seq_slots.append(seq.seq_slot)
        seq.seq_slot = -1

    def check(self) -> None:
        """Assert the invariants, for tests."""
        self.blocks.check([*self.running, *self.waiting])
        slots = [s.seq_slot for s in self.running] + self._free_seq_slots
        assert sorted(slots) == list(range(self.max_num_seqs)), f"slots are lost or doubled: {slots}"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING
            assert seq.num_pending >= 0
            assert seq.num_computed_tokens <= seq.num_tokens
            assert len(seq.block_table) >= self.blocks.blocks_needed(seq.num_computed_tokens)
            assert seq.num_tokens <= seq.max_len
            reserved = min(seq.num_computed_tokens + self.reserve_tokens_ahead, seq.max_len - 1)
            most = self.blocks.blocks_needed(max(seq.num_computed_tokens, reserved))
            assert len(seq.block_table) <= most, f"{seq} holds blocks that it never needs"
        if self._decode_run is not None:
            assert set(self._decode_run.step.sampling) == set(self.running), (
                "a run goes on, but a sequence came or left"
            )
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING
            assert not seq.block_table and seq.seq_slot == -1 and seq.num_computed_tokens == 0
