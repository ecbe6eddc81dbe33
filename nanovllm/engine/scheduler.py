"""Who runs in the next step, on how many tokens, in which cache blocks.

A step may mix sequences that decode (one token each) with pieces of prompts, under one token budget. Sequences that
run go first, in the order of their admission; what budget is left admits waiting ones. Where blocks run out, the
sequence admitted last is preempted: it gives up its blocks and is computed again later, its output kept.

A step can be scheduled while the one before it is still in flight. Blocks and slots are given back as soon as the host
knows that a sequence is over, even then: steps run one after the other on one stream, so whoever gets the block next
writes to it after the step in flight has.

While nobody comes, ends or lacks a block, steps repeat: the same sequences, each one token further. Such a run is kept
(`_Run`), with what will happen to it and when, so that a step of it looks only at the sequences that something happens to.

Where nobody waits for first tokens, prompts may *ride* on decode steps (`pacing.py`): beside its decodes such a step takes few
tokens of prompts, and never a prompt's last one, which is a decode of the step after. There too one kernel stores the keys of the
decodes and attends to them, so that nobody shares a block of the step before the next one.

Blocks are reserved ahead: where a sequence of a run needs one, all that will need one soon get theirs too (`AHEAD`), so that
the device hears of new blocks once in many steps, not in the step of each. Nobody is preempted for a reserved block, and
as many stay free as there are sequences that run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.fast import piggyback
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledSequence, ScheduledStep

AHEAD = 32
"""Tokens that a sequence which decodes has blocks for, beyond the step's, after blocks were reserved."""


@dataclass
class _Run:
    """Decodes that repeat, and when they cannot go on as they are."""

    step: ScheduledStep
    """The latest step."""
    last_offset: int
    """Continuations until a sequence reaches its greatest length."""
    block_starts: dict[int, list[Sequence]]
    """By continuation: the sequences whose token is the first of a block. Each is there once, with its next block."""


class Scheduler:
    """First come, first served, with preemption by recomputation.

    Args:
        block_manager: the KV cache's bookkeeping.
        max_num_seqs: most sequences in a step, and the number of slots.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest prompt plus output; the cache must hold at least one such sequence.
        eos_token_ids: tokens that end a sequence unless its `ignore_eos` is set.
        rides: whether prompts of offline sequences ride on decode steps.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        rides: bool = False,
    ) -> None:
        assert block_manager.num_blocks >= block_manager.blocks_needed(max_model_len), "a lone sequence must fit"
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.rides = rides
        self._ended_early = False
        """Whether an offline sequence stopped before its greatest length, since the scheduler was last idle."""
        self.num_preemptions = 0
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        """In the order of service. A dict, so that ending a waiting sequence takes the same time wherever it waits."""
        self.reset()

    def reset(self) -> None:
        """Begin anew, even from the midst of a decision: nobody runs, and of those that wait nobody waits for a step in flight.

        Who is in `waiting` afterwards will be served; all others are left to the caller to end.
        """
        self.running: list[Sequence] = []
        self._run: _Run | None = None
        self._head_lacks_blocks = False
        """Whether the first that waits found too few blocks, and none has been given back since."""
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self.blocks.reset()
        self.waiting = OrderedDict.fromkeys(
            seq for seq in self.waiting if seq.status is SequenceStatus.WAITING and not seq.num_pending
        )
        for seq in self.waiting:  # one of them may have been about to run
            seq.block_table, seq.num_registered_blocks, seq.num_computed_tokens, seq.slot = [], 0, 0, -1

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        if not self.has_unfinished:
            self._ended_early = False
        seq.max_len = min(seq.prompt_len + seq.params.max_tokens, self.max_model_len)
        seq.stop_ids = frozenset(seq.params.stop_token_ids) | (
            frozenset() if seq.params.ignore_eos else self.eos_token_ids
        )
        self.waiting[seq] = None

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before results in flight are read (or nothing is left)."""
        step = self._continue_run()
        if step is not None:
            return step
        self._run = None
        budget, riders = self._pace() if self.rides else (self.max_num_batched_tokens, None)
        parts = self._schedule_running(budget, riders)
        self._admit(parts, budget - sum(p.num_tokens for p in parts), riders)
        if not parts:
            return None
        parts.sort(key=lambda p: p.num_tokens != 1)  # stable
        step = ScheduledStep(tuple(parts))
        if len(parts) == len(self.running) and step.decodes_only:
            self._run = self._start_run(step)
        return step

    def _continue_run(self) -> ScheduledStep | None:
        """The next step of the run, or None if there is none or something has to be decided."""
        run = self._run
        if run is None or run.step.offset == run.last_offset or self._may_admit():
            return None
        step, block_size = run.step.next(), self.blocks.block_size
        block_starts = run.block_starts.pop(step.offset, ())
        grows = False
        for seq in block_starts:
            if len(seq.block_table) * block_size == seq.num_computed_tokens:
                grows = True
                if not self.blocks.grow(seq, seq.num_computed_tokens + 1):
                    return None  # someone has to be preempted; what has grown until here keeps its blocks
        for seq in step.sampling:
            seq.num_computed_tokens += 1
            seq.num_pending += 1
        for seq in block_starts:
            self.blocks.register(seq)
            run.block_starts.setdefault(step.offset + block_size, []).append(seq)
        if grows:
            for offset in range(step.offset + 1, step.offset + 1 + AHEAD):
                self._reserve(run.block_starts.get(offset, ()))
        run.step = step
        return step

    def _start_run(self, step: ScheduledStep) -> _Run:
        """Of a step that differs from the one before it, so that the device hears of something anyway."""
        block_starts: dict[int, list[Sequence]] = {}
        for seq in step.sampling:
            block_starts.setdefault(-seq.num_computed_tokens % self.blocks.block_size + 1, []).append(seq)
        self._reserve(step.sampling)
        return _Run(step, min(seq.max_len - seq.num_tokens for seq in step.sampling), block_starts)

    def _reserve(self, seqs: Iterable[Sequence]) -> None:
        """Give sequences of a run the blocks of their next tokens, up to AHEAD tokens and never beyond their greatest length, while as many blocks stay free as all that run may need for so many more."""
        block_size = self.blocks.block_size
        spare = len(self.running) * -(-AHEAD // block_size)
        for seq in seqs:
            # The last token is not computed.
            num_tokens = min(seq.num_computed_tokens + AHEAD, seq.max_len - 1)
            if num_tokens > len(seq.block_table) * block_size and not self.blocks.grow(seq, num_tokens, spare):
                break

    def _may_admit(self) -> bool:
        return bool(self.waiting and self._free_slots and not self._head_lacks_blocks)

    def _pace(self) -> tuple[int, int | None]:
        """(most tokens of this step, most tokens of prompts that ride on it); None for the latter: no prompt rides."""
        at_full_speed = self.max_num_batched_tokens, None
        decodes, prompts = [], []
        for seq in self.running:
            if not self._at_end(seq):
                (decodes if seq.num_tokens - seq.num_computed_tokens == 1 else prompts).append(seq)
        waiting = self.waiting if self._may_admit() else ()
        # More prompts than slots: what they wait for is that others end. Nor would the host have time to look at them all.
        if len(prompts) + len(waiting) > self.max_num_seqs:
            return at_full_speed
        prompts.extend(waiting)
        if self._ended_early or not prompts or not all(seq.offline for seq in prompts):
            return at_full_speed
        pace = piggyback.pace(
            [seq.max_len - seq.num_tokens for seq in decodes],
            max((seq.max_len - seq.num_tokens for seq in decodes if seq.offline), default=None),
            ((seq.num_tokens - seq.num_computed_tokens, seq.max_len - seq.num_tokens) for seq in prompts),
            self.max_num_seqs,
            self.max_num_batched_tokens - len(decodes),
        )
        budget = min(len(decodes) + pace.riding + pace.at_once, self.max_num_batched_tokens)
        return budget, None if pace.at_once else pace.riding

    def _schedule_running(self, budget: int, riders: int | None) -> list[ScheduledSequence]:
        parts: list[ScheduledSequence] = []
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            left = 0 if self._at_end(seq) else seq.num_tokens - seq.num_computed_tokens
            num_tokens = min(_most_of_prompt(left, parts, riders), budget)
            if num_tokens == 0:
                i += 1
                continue
            while not self.blocks.grow(seq, seq.num_computed_tokens + num_tokens):
                if self._preempt_last() is seq:
                    break
            else:
                parts.append(self._take(seq, num_tokens, rides=riders is not None))
                budget -= num_tokens
                i += 1
        return parts

    @staticmethod
    def _at_end(seq: Sequence) -> bool:
        """Whether its last token is in flight, so that nothing is left to compute."""
        return bool(seq.num_pending) and seq.num_tokens >= seq.max_len

    def _admit(self, parts: list[ScheduledSequence], budget: int, riders: int | None) -> None:
        """Add the parts of waiting sequences in their order, as far as everything suffices."""
        while self.waiting and budget > 0 and self._free_slots:
            seq = next(iter(self.waiting))
            if seq.num_pending:
                break  # preempted with a token in flight: its tokens are not all known yet
            prefix = self.blocks.match_prefix(seq)
            start = len(prefix) * self.blocks.block_size
            num_tokens = min(_most_of_prompt(seq.num_tokens - start, parts, riders), budget)
            if num_tokens == 0:
                break
            # One that rides comes when all of it fits, as it would at once: else decodes that grow would soon preempt it.
            if not self.blocks.admit(seq, prefix, start + num_tokens, 0 if riders is None else seq.num_tokens):
                self._head_lacks_blocks = True
                break
            del self.waiting[seq]
            seq.status = SequenceStatus.RUNNING
            seq.slot = self._free_slots.pop()
            seq.num_computed_tokens = start
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = start
            self.running.append(seq)
            parts.append(self._take(seq, num_tokens, admitted=True, rides=riders is not None))
            budget -= num_tokens

    def update(self, step: ScheduledStep, token_ids: list[int]) -> list[Sequence]:
        """Take the tokens that a step sampled, one for each of its parts that samples, in order.

        Returns the sequences that grew; some of them finished by it. Tokens of sequences that finished before are dropped.
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

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, whether it waits, runs, has a step in flight or was never added, and take back what it holds."""
        if seq.finished:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.blocks.register(seq)
            self._release(seq)
        elif seq in self.waiting:
            del self.waiting[seq]
            self._head_lacks_blocks = False  # who waits behind it may need fewer blocks
        self._ended_early |= seq.offline and reason == "stop"
        seq.end(reason, stop_reason)

    def _take(self, seq: Sequence, num_tokens: int, admitted: bool = False, rides: bool = False) -> ScheduledSequence:
        start = seq.num_computed_tokens
        early = rides or num_tokens == 1
        if early:
            # Only what earlier steps compute: in a step of single tokens one kernel stores keys and attends to them, so that
            # nobody may share the block which this token completes before the next step; nor one that a rider completes.
            self.blocks.register(seq)
        seq.num_computed_tokens += num_tokens
        samples = seq.num_computed_tokens == seq.num_tokens
        if samples:
            seq.num_pending += 1
        if not early:
            self.blocks.register(seq)
        return ScheduledSequence(seq, start, num_tokens, samples, seq.slot, admitted)

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1
        return seq

    def _release(self, seq: Sequence) -> None:
        self._run = None
        self._head_lacks_blocks = False
        self.blocks.free(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    def _stop_by_token(self, seq: Sequence, token: int) -> None:
        params = seq.params
        if token in seq.stop_ids and seq.num_output_tokens >= params.min_tokens:
            by_eos = token in self.eos_token_ids and not params.ignore_eos
            self.finish(seq, "stop", None if by_eos else token)
        elif len(seq.token_ids) >= seq.max_len:
            self.finish(seq, "length")

    def check(self) -> None:
        """Assert the invariants; cheap enough to call after every operation in a test."""
        self.blocks.check([*self.running, *self.waiting])
        slots = [s.slot for s in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.max_num_seqs)), f"slots are lost or doubled: {slots}"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING
            assert seq.num_pending >= 0
            assert seq.num_computed_tokens <= seq.num_tokens
            assert len(seq.block_table) >= self.blocks.blocks_needed(seq.num_computed_tokens)
            assert seq.num_tokens <= seq.max_len
            most = max(seq.num_computed_tokens, min(seq.num_computed_tokens + AHEAD, seq.max_len - 1))
            assert len(seq.block_table) <= self.blocks.blocks_needed(most), f"{seq} holds blocks that it never needs"
        if self._run is not None:
            assert set(self._run.step.sampling) == set(self.running), "a run goes on without someone who came or left"
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING
            assert not seq.block_table and seq.slot == -1 and seq.num_computed_tokens == 0


def _most_of_prompt(left: int, parts: list[ScheduledSequence], riders: int | None) -> int:
    """Tokens of a prompt, of which so many are left, that a step with these parts may take; `riders` as in `Scheduler._pace`."""
    if riders is None or left <= 1:  # one that is admitted with a single token does not ride, nor does then the step
        return left
    pieces = [p.num_tokens for p in parts if not p.samples]
    return min(left - 1, riders - sum(pieces)) if len(pieces) < piggyback.MAX_RIDERS else 0
