"""From logits to token ids for one step, with what that needs per row (metadata) and per sequence (penalty state)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import to_device_together
from nanovllm.engine.logit_rules import LogitChange
from nanovllm.engine.logprobs import LogprobsTensors, compute_logprobs
from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.token_masks import MaskBuilder, TokenMasks
from nanovllm.kernels import apply_token_bitmask
from nanovllm.kernels.ops.sample import apply_penalties, rows_per_chunk
from nanovllm.sampling_params import SamplingParams


class SamplingRow(NamedTuple):
    """What the engine says about one row that samples in this step."""

    params: SamplingParams
    seed: int
    """The key of the sequence's random numbers; its low 64 bits count."""
    position: int
    """Which draw this is: the new token's position in the sequence, so that a recomputed sequence draws the same."""
    seq_slot: int
    """The sequence's seq_slot, by which the sampler keeps what penalties need; no two rows of a step share one."""
    changes: Sequence[LogitChange] = ()
    """Bias, bad words, and the end and stop tokens that are banned before `min_tokens` is reached."""

    @classmethod
    def of(cls, seq: TokenSequence, position: int, seq_slot: int) -> SamplingRow:
        """The row of a sequence that gets its token number `position`."""
        changes: list[LogitChange] = []
        if position - seq.prompt_len < seq.params.min_tokens:
            changes += map(LogitChange, seq.stop_ids)
        if seq.logit_rules is not None:
            num_unknown = position - len(seq.token_ids)
            assert 0 <= num_unknown <= 1, "the device compares one token"
            changes += seq.logit_rules.changes(seq.token_ids, seq.prompt_len, num_unknown == 1)
        if seq.constraint is not None:  # its mask has the bans, as far as they leave a token
            changes = [change for change in changes if change.value != -math.inf]
        return cls(seq.params, seq.seed, position, seq_slot, changes)


class PackedSampling(NamedTuple):
    """What R rows say about sampling, as arrays of the device's types."""

    draws: np.ndarray
    """[3, R] int64: seed (the same 64 bits, signed), position, seq_slot."""
    floats: np.ndarray
    """[6, R] float32: temperature, top-p, min-p, and repetition, presence and frequency penalty."""
    top_k: np.ndarray
    """[R] int32"""

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> PackedSampling:
        draws = [(row.seed % 2**64, row.position, row.seq_slot) for row in rows]
        params = [row.params for row in rows]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in params
        ]
        return cls(
            np.array(draws, np.uint64).reshape(-1, 3).T.view(np.int64),
            # A temperature beyond float32 stays finite: logit / inf would be NaN for a logit of -inf.
            np.array(floats, np.float64).reshape(-1, 6).clip(max=np.finfo(np.float32).max).astype(np.float32).T,
            np.array([min(p.top_k, np.iinfo(np.int32).max) for p in params], np.int32),
        )


class LogitChanges(NamedTuple):
    """The changes of all rows, as device tensors [num_changes]."""

    rows: torch.Tensor
    """int64"""
    token_ids: torch.Tensor
    """int64"""
    after: torch.Tensor
    """int64, as `LogitChange.after`"""
    values: torch.Tensor
    """float32"""
    conditional: bool
    """On the host: whether any change depends on the last token."""


@dataclass(frozen=True)
class SamplingMetadata:
    """Device tensors, one entry for each of the R rows that sample in a step. None: no row needs it."""

    temperature: torch.Tensor
    """[R] float32"""
    top_k: torch.Tensor | None
    """[R] int32"""
    top_p: torch.Tensor | None
    """[R] float32"""
    min_p: torch.Tensor | None
    """[R] float32"""
    seeds: torch.Tensor
    """[R] int64"""
    positions: torch.Tensor
    """[R] int64"""
    seq_slots: torch.Tensor
    """[R] int64"""
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Repetition, presence and frequency penalty, [R] float32 each."""
    changes: LogitChanges | None
    all_greedy: bool
    """On the host: every row takes its largest logit, so no randomness or filter is computed."""
    max_logprobs: int | None
    """On the host: the largest `logprobs` of any row; None: no row wants log-probabilities."""

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device | str) -> SamplingMetadata:
        """Everything in one copy to the device; on CUDA from pinned memory, without waiting for it."""
        params = [row.params for row in rows]
        changes = [(i, change) for i, row in enumerate(rows) for change in row.changes]
        arrays = [*PackedSampling.of(rows)]
        if changes:
            arrays.append(np.array([(i, c.token_id, c.after) for i, c in changes], np.int64).T)
            arrays.append(np.array([c.value for _, c in changes], np.float32))
        draws, floats, top_k, *changed = to_device_together(arrays, torch.device(device))
        sent_changes = None
        if changes:
            where, values = changed
            sent_changes = LogitChanges(where[0], where[1], where[2], values, any(c.after >= 0 for _, c in changes))
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            temperature=floats[0],
            top_k=top_k if any(p.uses_filters and p.top_k > 0 for p in params) else None,
            top_p=floats[1] if any(p.uses_filters and p.top_p < 1 for p in params) else None,
            min_p=floats[2] if any(p.uses_filters and p.min_p > 0 for p in params) else None,
            seeds=draws[0],
            positions=draws[1],
            seq_slots=draws[2],
            penalties=(floats[3], floats[4], floats[5]) if any(p.uses_penalties for p in params) else None,
            changes=sent_changes,
            all_greedy=all(p.greedy for p in params),
            max_logprobs=max(wanted, default=None),
        )


class SamplerOutput(NamedTuple):
    token_ids: torch.Tensor
    """[R] int64, on the device"""
    logprobs: LogprobsTensors | None
    """None if no row asked"""


class Sampler:
    """Turns logits into token ids on the device. Only masks of constrained rows wait for the device.

    It owns the penalty state: for each of `max_num_seqs` seq_slots which tokens the prompt holds and how often each
    token is in the output. The state is 5 bytes * max_num_seqs * vocab_size and exists from the first request that uses
    a penalty on. A seq_slot belongs to the sequence last admitted to it. The rows of sequences without penalties hold
    values that their penalties (1, 0 and 0) ignore.

    Args:
        max_num_seqs: number of seq_slots.
        vocab_size: columns of the logits.
        device: where the logits are.
        sample_op: a provider of the op `sample`.
        mask_op: a provider of the op `apply_token_bitmask`.

    Attributes:
        masks: makes the masks of constrained rows. `engine/fast/` may put another builder in its place.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        sample_op: Callable[..., torch.Tensor],
        mask_op: Callable[..., None] = apply_token_bitmask,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.sample_op = sample_op
        self.mask_op = mask_op
        self.masks = MaskBuilder(self.device)
        self._penalty_state: tuple[torch.Tensor, torch.Tensor] | None = None
        """[max_num_seqs, vocab_size] each: whether the prompt has a token (bool), its count in the output (int32)."""

    def admit(
        self, seq_slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Give a seq_slot to a sequence, before its first sampling step and again whenever it resumes with new tokens.

        Args:
            seq_slot: in [0, max_num_seqs).
            prompt_token_ids, output_token_ids: what the sequence holds so far, each in [0, vocab_size).
            params: nothing is done unless they use a penalty.
        """
        if not params.uses_penalties:
            return
        self.masks.drain()  # pinned memory for `_to_device` may have to wait for the device
        if self._penalty_state is None:
            shape = (self.max_num_seqs, self.vocab_size)
            output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._penalty_state = torch.zeros(shape, dtype=torch.bool, device=self.device), output_counts
        prompt_mask, output_counts = self._penalty_state
        prompt_mask[seq_slot].zero_().index_fill_(0, self._to_device(prompt_token_ids), True)
        output = self._to_device(output_token_ids)
        output_counts[seq_slot].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def release_penalty_state(self) -> None:
        """Give the penalty state's memory back; the next sequence with a penalty makes it anew."""
        self._penalty_state = None

    def __call__(
        self,
        logits: torch.Tensor,
        meta: SamplingMetadata,
        last_tokens: torch.Tensor | None = None,
        masks: Callable[[], TokenMasks] | None = None,
    ) -> SamplerOutput:
        """Sample one token per row, and count it in the penalty state of rows with penalties.

        Args:
            logits: [R, V], any float dtype; not modified.
            meta: the sampling metadata of the same R rows; no seq_slot twice.
            last_tokens: [max_num_seqs or more] int64, the token last sampled in each seq_slot. It is needed where a
                change of a logit depends on a token that the host does not know.
            masks: gives those of the rows with a constraint; None: there are no such rows.
        """
        # Log-probabilities are of the model's own distribution, before all changes, as in vLLM.
        raw = logits
        if meta.changes is not None:
            logits = changed_logits(logits, meta.changes, meta.seq_slots, last_tokens)
        if meta.penalties is not None:
            logits = self._penalize(logits, meta, *meta.penalties, in_place=logits is not raw)
        if masks is not None:
            if logits is raw:
                logits = logits.clone()
            self.mask_op(logits, *masks())
        if meta.all_greedy:
            token_ids = logits.argmax(-1)
        else:
            token_ids = self.sample_op(
                logits, meta.temperature, meta.top_k, meta.top_p, meta.min_p, meta.seeds, meta.positions
            )
        if meta.penalties is not None and self._penalty_state is not None:
            ones = torch.ones_like(token_ids, dtype=torch.int32)
            self._penalty_state[1].view(-1).scatter_add_(0, meta.seq_slots * self.vocab_size + token_ids, ones)
        if meta.max_logprobs is None:
            return SamplerOutput(token_ids, None)
        return SamplerOutput(token_ids, compute_logprobs(raw, token_ids, meta.max_logprobs))

    def _penalize(
        self, logits: torch.Tensor, meta: SamplingMetadata, *penalties: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        """float32 [R, V]. penalties: repetition, presence and frequency, as in `SamplingMetadata`."""
        if self._penalty_state is None:
            raise RuntimeError("a row uses penalties, but no such sequence was admitted; call Sampler.admit first")
        prompt_mask, output_counts = self._penalty_state
        penalized = logits if in_place else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        n = rows_per_chunk(self.vocab_size)
        for start in range(0, len(logits), n):
            rows = slice(start, start + n)
            slots = meta.seq_slots[rows]
            penalized[rows] = apply_penalties(
                logits[rows], prompt_mask[slots], output_counts[slots], *(penalty[rows] for penalty in penalties)
            )
        return penalized

    def _to_device(self, token_ids: Sequence[int]) -> torch.Tensor:
        pin = self.device.type == "cuda"  # a copy from pageable memory would wait for the device
        return torch.tensor(token_ids, dtype=torch.int64, pin_memory=pin).to(self.device, non_blocking=pin)


def changed_logits(
    logits: torch.Tensor, changes: LogitChanges, seq_slots: torch.Tensor, last_tokens: torch.Tensor | None
) -> torch.Tensor:
    """A float32 copy of the logits [R, V] with the changes of its rows added. seq_slots: [R] int64."""
    values = changes.values
    if changes.conditional:
        if last_tokens is None:
            raise RuntimeError("a change depends on the last token; pass last_tokens to the sampler")
        last = last_tokens[seq_slots[changes.rows]]
        values = torch.where((changes.after < 0) | (changes.after == last), values, 0.0)
    changed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
    changed.view(-1).scatter_add_(0, changes.rows * logits.shape[1] + changes.token_ids, values)
    return changed
