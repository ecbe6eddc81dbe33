"""Who runs in the next step, on how many tokens, in which cache blocks.

A step may mix sequences that decode (one token each) with pieces of prompts, under one token budget. Sequences that
run go first, in the order of their admission; what budget is left admits waiting ones. Where blocks run out, the
sequence admitted last is preempted: it gives up its blocks and is computed again later, its output kept.

A step can be scheduled while the one before it is still in flight. Blocks and slots are given back as soon as the host
knows that a sequence is over, even then: steps run one after the other on one stream, so whoever gets the block next
writes to it after the step in flight has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's part in a step: compute tokens start .. start + num_tokens - 1, and maybe sample the next."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the step reaches the sequence's end, so that its last token's logits give a new token."""
    slot: int
    admitted: bool
    """Whether the sequence takes its slot in this step, so that the slot's device state must be set up."""


@dataclass(frozen=True)
class ScheduledStep:
    """Everything of one step; single-token parts come first."""

    parts: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.parts)

    @property
    def num_decodes(self) -> int:
        return sum(p.num_tokens == 1 for p in self.parts)


class Scheduler:
    """First come, first served, with preemption by recomputation.

    Args:
        block_manager: the KV cache's bookkeeping.
        max_num_seqs: most sequences in a step, and the number of slots.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest prompt plus output; the cache must hold at least one such sequence.
        eos_token_ids: tokens that end a sequence unless its `ignore_eos` is set.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        assert block_manager.num_blocks >= block_manager.blocks_needed(max_model_len), "a lone sequence must fit"
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before results in flight are read (or nothing is left)."""
        budget = self.max_num_batched_tokens
        parts: list[ScheduledSequence] = []
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            num_tokens = min(self._tokens_to_compute(seq), budget)
            if num_tokens == 0:
                i += 1
                continue
            while not self.blocks.grow(seq, seq.num_computed_tokens + num_tokens):
                if self._preempt_last() is seq:
                    break
            else:
                parts.append(self._take(seq, num_tokens))
                budget -= num_tokens
                i += 1
        admitted: list[Sequence] = []
        while self.waiting and budget > 0 and self._free_slots:
            seq = self.waiting[0]
            if seq.num_pending:
                break  # preempted with a token in flight: its tokens are not all known yet
            prefix = self.blocks.match_prefix(seq)
            start = len(prefix) * self.blocks.block_size
            num_tokens = min(seq.num_tokens - start, budget)
            if not self.blocks.admit(seq, prefix, start + num_tokens):
                break
            self.waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            seq.slot = self._free_slots.pop()
            seq.num_computed_tokens = start
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = start
            admitted.append(seq)
            parts.append(self._take(seq, num_tokens, admitted=True))
            budget -= num_tokens
        self.running.extend(admitted)
        if not parts:
            return None
        parts.sort(key=lambda p: p.num_tokens != 1)  # stable
        return ScheduledStep(tuple(parts))

    def update(self, step: ScheduledStep, token_ids: list[int]) -> list[Sequence]:
        """Take the tokens that a step sampled, one for each of its parts that samples, in order.

        Returns the sequences that grew; some of them finished by it. Tokens of sequences that finished before are dropped.
        """
        grown = []
        sampling = [p.seq for p in step.parts if p.samples]
        assert len(sampling) == len(token_ids)
        for seq, token in zip(sampling, token_ids):
            seq.num_pending -= 1
            if seq.finished:
                continue
            seq.token_ids.append(token)
            grown.append(seq)
            self._stop_by_token(seq, token)
        return grown

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, whether it waits, runs or has a step in flight, and take back what it holds."""
        if seq.finished:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.blocks.register(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def _tokens_to_compute(self, seq: Sequence) -> int:
        at_end = seq.num_tokens - seq.prompt_len >= seq.params.max_tokens or seq.num_tokens >= self.max_model_len
        # A sequence whose last token is in flight has nothing left to compute.
        return 0 if at_end and seq.num_pending else seq.num_tokens - seq.num_computed_tokens

    def _take(self, seq: Sequence, num_tokens: int, admitted: bool = False) -> ScheduledSequence:
        start = seq.num_computed_tokens
        seq.num_computed_tokens += num_tokens
        samples = seq.num_computed_tokens == seq.num_tokens
        if samples:
            seq.num_pending += 1
        self.blocks.register(seq)
        return ScheduledSequence(seq, start, num_tokens, samples, seq.slot, admitted)

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        return seq

    def _release(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    def _stop_by_token(self, seq: Sequence, token: int) -> None:
        params = seq.params
        num_output = seq.num_output_tokens
        if num_output >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return self.finish(seq, "stop")
            if token in params.stop_token_ids:
                return self.finish(seq, "stop", token)
        if num_output >= params.max_tokens or len(seq.token_ids) >= self.max_model_len:
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
            assert seq.num_output_tokens + seq.num_pending <= seq.params.max_tokens
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING
            assert not seq.block_table and seq.slot == -1 and seq.num_computed_tokens == 0
