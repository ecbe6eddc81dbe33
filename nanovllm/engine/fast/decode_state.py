"""The decode state on the device: one row for each sequence that decodes, advanced by the step itself.

Inputs, cache addresses and sampling parameters of a row stay where they are from step to step; after sampling,
`advance` moves every row on by one token. The host keeps a mirror of what a row holds, and sends a *row update* (one
row's complete state) only where the two differ: a sequence came, another one took its row, or the device lacks a block
that it needs. All row updates of a step are one copy from pinned memory. If there are any, the step also sends all
other rows whose block table grew. Blocks are reserved ahead, so most steps send nothing. A row without a sequence is a
*padding row*: it computes one token in the padding block, and never advances.

Everything here runs on CPU tensors too; on a GPU `advance` may be a Triton kernel, and is part of the captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from nanovllm.engine.batch import DeviceBatch, resolve_tokens
from nanovllm.engine.fast.prefix_groups import PrefixGroups
from nanovllm.engine.fast.step_shape import SamplingMode
from nanovllm.engine.fast.token_ring import TokenRing
from nanovllm.engine.kv_cache import kv_slot
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sampler import PackedSampling, SamplingRow
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledSequence, ScheduledStep
from nanovllm.engine.token_masks import ConstrainedRow

# A row update: its row, the int64 fields, the int32 fields (two a word), the block table (two a word).
_TOKEN, _POSITION, _KV_SLOT, _DRAW, _SEED, _SEQ_SLOT, _ACTIVE, _NUM_INTS = range(8)
_CONTEXT_LEN, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P, _NUM_SMALL = range(6)
_FIRST_SMALL = 1 + _NUM_INTS
_FIRST_BLOCK = _FIRST_SMALL + (_NUM_SMALL + 1) // 2


class DecodeState:
    """The rows and their mirror on the host.

    Args:
        paged: the model whose sequences the rows belong to. There are as many rows as sequences may run.
        advance: what moves rows on; `advance_rows` or a kernel with its arguments.
        prefixes: finds the sequences that share leading blocks; None: prefix groups are off.
        ring: host memory that `advance` writes the tokens to; None: the host copies them.
    """

    def __init__(
        self,
        paged: PagedModel,
        advance: Callable[..., None] | None = None,
        prefixes: PrefixGroups | None = None,
        ring: TokenRing | None = None,
    ) -> None:
        max_num_seqs, max_blocks = paged.max_num_seqs, paged.max_blocks
        padding_block, device = paged.padding_block, paged.device
        self.prefixes = prefixes
        self.ring = ring
        self.block_size = paged.block_size
        self._paged = paged
        self._advance = advance or advance_rows
        self.int64_fields = torch.zeros(_NUM_INTS, max_num_seqs, dtype=torch.int64, device=device)
        """With `int32_fields`: the fields of every row on the device, which steps read and advance."""
        self.int64_fields[_KV_SLOT] = kv_slot(padding_block, 0, self.block_size)
        self.int64_fields[_SEQ_SLOT] = max_num_seqs
        self.int32_fields = torch.zeros(_NUM_SMALL, max_num_seqs, dtype=torch.int32, device=device)
        self.int32_fields[_CONTEXT_LEN] = 1
        self._float_fields = self.int32_fields.view(torch.float32)
        self._block_table = torch.full((max_num_seqs, max_blocks), padding_block, dtype=torch.int32, device=device)
        self._cached_views: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]] | None = None

        self.num_rows = 0
        """Rows that sequences have: the first ones."""
        self._seqs: list[Sequence | None] = [None] * max_num_seqs
        self._row_of_seq_slot = np.full(max_num_seqs, -1)
        self._seq_slot_of_row = np.full(max_num_seqs, -1)
        self._positions = np.zeros(max_num_seqs, np.int64)  # of the token that the row computes next
        self._num_blocks = np.zeros(max_num_seqs, np.int64)  # entries of its block table that the device has
        self._modes = np.zeros(max_num_seqs, np.int64)  # `SamplingMode` of the row, were nothing banned
        self._bans_end = np.zeros(max_num_seqs, np.int64)  # from this position on nothing is banned
        self._constrained = np.zeros(max_num_seqs, bool)
        self._rows = np.zeros(0, np.int64)  # of each decode of the step placed last, as `place` returns it
        self._constrained_rows: list[int] = []  # of the placed rows

    # ---------------------------------------------------------------------------------------------- before a step

    def forget(self, seq_slot: int) -> None:
        """The seq_slot has a new owner."""
        row = self._row_of_seq_slot[seq_slot]
        if row >= 0:
            self._row_of_seq_slot[seq_slot] = self._seq_slot_of_row[row] = -1
            self._positions[row] = -1

    def reset(self) -> None:
        """Forget the mirror after a step that failed: every row is sent again before it is used."""
        self._row_of_seq_slot[:] = self._seq_slot_of_row[:] = self._positions[:] = -1
        self.num_rows = len(self._seqs)
        if self.prefixes is not None:
            self.prefixes.reset()
        if self.ring is not None:
            self.ring.reset()

    def place(self, step: ScheduledStep) -> np.ndarray:
        """Give every decode of a step of kind DECODE or PIGGYBACKED a row, and make the device's rows what the step
        needs.

        Returns:
            [num_seqs] int64: the row of each decode. Together they are rows 0 .. num_seqs - 1.
        """
        if self.ring is not None:
            self.ring.claim()
        if step.continues:
            n = self.num_rows
            changed, moved = [], False
            if (self._positions[:n] // self.block_size >= self._num_blocks[:n]).any():
                changed = np.flatnonzero(_table_lengths(self.seqs) > self._num_blocks[:n]).tolist()
        else:
            changed, moved = self._place_anew(step.sampling_parts)
        if changed:
            self.send(changed)
        if moved and self.prefixes is not None:
            self.prefixes.update(self.num_rows, self._positions)
        return self._rows

    def _place_anew(self, parts: tuple[ScheduledSequence, ...]) -> tuple[list[int], bool]:
        """(rows to send, whether another sequence has one of the rows or their number has changed)"""
        n, before = len(parts), self.num_rows
        seq_slots = np.fromiter((p.seq_slot for p in parts), np.int64, n)
        starts = np.fromiter((p.start for p in parts), np.int64, n)
        rows = self._row_of_seq_slot[seq_slots]
        keeps_row = (0 <= rows) & (rows < n)
        free = np.ones(n, bool)
        free[rows[keeps_row]] = False
        rows[~keeps_row] = np.flatnonzero(free)
        outdated = (
            ~keeps_row | (self._positions[rows] != starts) | (starts // self.block_size >= self._num_blocks[rows])
        )
        if outdated.any() or n < before:  # something is sent: what grew goes with it
            outdated |= _table_lengths(p.seq for p in parts) > self._num_blocks[rows]
        owned = self._seq_slot_of_row[self._seq_slot_of_row >= 0]
        self._row_of_seq_slot[owned] = -1
        self._seq_slot_of_row[:] = -1
        self._row_of_seq_slot[seq_slots] = rows
        self._seq_slot_of_row[rows] = seq_slots
        self._positions[rows] = starts
        for i in np.flatnonzero(outdated).tolist():
            self._assign(int(rows[i]), parts[i].seq)
        for row in range(n, before):
            self._seqs[row] = None
        self.num_rows, self._rows = n, rows
        self._constrained_rows = np.flatnonzero(self._constrained[:n]).tolist()
        return [*rows[outdated].tolist(), *range(n, before)], n != before or not keeps_row.all()

    def _assign(self, row: int, seq: Sequence) -> None:
        params = seq.params
        self._seqs[row] = seq
        bans = seq.stop_ids and seq.constraint is None
        self._bans_end[row] = seq.prompt_len + min(params.min_tokens, 2**31) if bans else 0
        self._constrained[row] = seq.constraint is not None
        if params.uses_penalties or params.changes_logits or params.logprobs is not None:
            self._modes[row] = SamplingMode.GENERAL
        elif params.greedy:
            self._modes[row] = SamplingMode.GREEDY
        else:
            self._modes[row] = SamplingMode.FILTERED if params.uses_filters else SamplingMode.PLAIN

    def send(self, rows: list[int]) -> None:
        """Write the updates of some rows, and copy them to the device without waiting."""
        paged = self._paged
        filled = [(i, row, seq) for i, row in enumerate(rows) if (seq := self._seqs[row]) is not None]
        num_blocks = max((len(seq.block_table) for _, _, seq in filled), default=1)
        shape = (len(rows), _FIRST_BLOCK + (num_blocks + 1) // 2)
        host = torch.empty(shape, dtype=torch.int64, pin_memory=paged.device.type == "cuda")
        updates = host.numpy()
        ints = updates[:, 1:_FIRST_SMALL]
        small = updates[:, _FIRST_SMALL:_FIRST_BLOCK].view(np.int32)
        floats = small.view(np.float32)
        blocks = updates[:, _FIRST_BLOCK:].view(np.int32)
        # Padding rows first; a temperature of 0 is the cheapest.
        updates[:, 0] = rows
        ints[:] = (0, 0, kv_slot(paged.padding_block, 0, self.block_size), 0, 0, paged.max_num_seqs, 0)
        small[:, : _TEMPERATURE + 1] = (1, 0, 0)
        floats[:, _TOP_P : _MIN_P + 1] = (1, 0)
        blocks[:] = paged.padding_block
        sampling: list[SamplingRow] = []
        for i, row, seq in filled:
            table, position = seq.block_table, int(self._positions[row])
            seq_slot = int(self._seq_slot_of_row[row])
            # A token that the host does not know yet is in its seq_slot on the device.
            ints[i, _TOKEN] = seq.token_ids[position] if position < len(seq.token_ids) else -1 - seq_slot
            ints[i, _POSITION] = position
            ints[i, _KV_SLOT] = kv_slot(table[position // self.block_size], position, self.block_size)
            ints[i, _ACTIVE] = 1
            small[i, _CONTEXT_LEN] = position + 1
            blocks[i, : len(table)] = table
            self._num_blocks[row] = len(table)
            if self.prefixes is not None:
                self.prefixes.set_table(row, blocks[i, : len(table)])
            sampling.append(SamplingRow(seq.params, seq.seed, position + 1, seq_slot))
        if filled:
            places = [i for i, _, _ in filled]
            packed = PackedSampling.of(sampling)
            ints[places, _SEED], ints[places, _DRAW], ints[places, _SEQ_SLOT] = packed.draws
            floats[places, _TEMPERATURE : _MIN_P + 1] = packed.floats[:3].T
            small[places, _TOP_K] = packed.top_k
        self._write(host.to(paged.device, non_blocking=True), num_blocks)

    def _write(self, updates: torch.Tensor, num_blocks: int) -> None:
        rows = updates[:, 0]
        tokens = resolve_tokens(updates[:, 1 + _TOKEN], self._paged.last_tokens)
        self.int64_fields.index_copy_(1, rows, updates[:, 1:_FIRST_SMALL].T)
        self.int64_fields[_TOKEN].index_copy_(0, rows, tokens)
        small = updates[:, _FIRST_SMALL:_FIRST_BLOCK].view(torch.int32)
        self.int32_fields.index_copy_(1, rows, small[:, :_NUM_SMALL].T)
        blocks = updates[:, _FIRST_BLOCK:].view(torch.int32)
        self._block_table[:, :num_blocks].index_copy_(0, rows, blocks[:, :num_blocks])

    # ---------------------------------------------------------------------------------------------- the step's needs

    @property
    def sampling_mode(self) -> SamplingMode:
        """What sampling the next token of every placed sequence takes."""
        n = self.num_rows
        if (self._positions[:n] + 1 < self._bans_end[:n]).any():
            return SamplingMode.GENERAL
        return SamplingMode(int(self._modes[:n].max()))

    @property
    def max_context_len(self) -> int:
        return int(self._positions[: self.num_rows].max()) + 1

    @property
    def seqs(self) -> list[Sequence]:
        """The placed sequences by row."""
        return [seq for seq in self._seqs[: self.num_rows] if seq is not None]

    def constrained(self) -> list[ConstrainedRow]:
        """The placed sequences that have a constraint."""
        rows, positions, seqs = self._constrained_rows, self._positions, self._seqs
        return [ConstrainedRow(row, seq, int(positions[row]) + 1) for row in rows if (seq := seqs[row]) is not None]

    def positions(self) -> list[int]:
        """By row: the position of the token that the step computes."""
        return self._positions[: self.num_rows].tolist()

    def seq_slots(self) -> list[int]:
        """By row: the sequence's seq_slot."""
        return self._seq_slot_of_row[: self.num_rows].tolist()

    # ---------------------------------------------------------------------------------------------- on the device

    def batch(self, num_rows: int, max_context_len: int, shared: bool = False) -> DeviceBatch:
        """What the model's forward takes, for the first `num_rows` rows: views, so that a captured graph stays right.

        shared: with the groups that `prefixes` keeps.
        """
        ints, context_lens, block_table, _ = self._views(num_rows)
        return DeviceBatch.from_tensors(
            ints[: _KV_SLOT + 1],
            context_lens,
            block_table,
            max_context_len,
            shared=self.prefixes.tensors(num_rows) if shared and self.prefixes is not None else None,
        )

    def _views(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Of the first rows, kept over steps: int64 fields, context lengths, block table, sampling arguments."""
        if self._cached_views is None or self._cached_views[1].shape[0] != num_rows:
            ints, small, floats = (t[:, :num_rows] for t in (self.int64_fields, self.int32_fields, self._float_fields))
            sampling = (floats[_TEMPERATURE], small[_TOP_K], floats[_TOP_P], floats[_MIN_P], ints[_SEED], ints[_DRAW])
            self._cached_views = ints, small[_CONTEXT_LEN], self._block_table[:num_rows], sampling
        return self._cached_views

    def sampling_arguments(self, num_rows: int, filtered: bool) -> tuple[torch.Tensor | None, ...]:
        """What the op `sample` takes after the logits, for the first `num_rows` rows: views, as in `batch`."""
        temperature, *filters, seed, draw = self._views(num_rows)[3]
        return temperature, *(filters if filtered else [None] * len(filters)), seed, draw

    def advance(self, tokens: torch.Tensor) -> None:
        """On the device: the first len(tokens) rows continue with these tokens [n] int64; padding rows stay."""
        ring = () if self.ring is None else (self.ring.tokens, self.ring.count)
        self._advance(tokens, *self._views(tokens.shape[0])[:3], self._paged.last_tokens, self.block_size, *ring)

    def advance_mirror(self) -> None:
        """On the host: a step that advances every placed row was launched."""
        self._positions[: self.num_rows] += 1
        if self.ring is not None:
            self.ring.step_launched()

    def tokens(self) -> torch.Tensor:
        """[num_seqs] int64: each row's latest token. A view of the ring's cell; without a ring, of what the next
        step overwrites.
        """
        tokens = self.int64_fields[_TOKEN] if self.ring is None else self.ring.latest()
        return tokens[: self.num_rows]


def _table_lengths(seqs: Iterable[Sequence]) -> np.ndarray:
    return np.fromiter((len(seq.block_table) for seq in seqs), np.int64)


def advance_rows(
    tokens: torch.Tensor,
    ints: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
    host_tokens: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> None:
    """Move rows on by one token, in place; the reference of `kernels.triton.sampling.advance`.

    Args:
        tokens: [n] int64, what was sampled.
        ints: [7, n] int64: each row's token, its position and its kv_slot; the position of the next draw; seed;
            seq_slot; and 1, or 0 for padding, whose position stays.
        context_lens: [n] int32.
        block_table: [n, max_blocks] int32. Where the next token needs a block that the table does not have yet, the
            kv_slot is wrong until the host has sent it.
        last_tokens: [max_num_seqs + 1] int64, by seq_slot.
        host_tokens, count: [depth, max_num_seqs] and [1] int64, both or none: row count % depth takes the tokens, and
            count grows by one. See `TokenRing`; the reference needs both on one device.
    """
    views: list[Any] = [tokens, ints, context_lens, block_table, last_tokens, host_tokens, count]
    on_host = ints.device.type == "cpu"
    if on_host:  # NumPy's small operations take a tenth of PyTorch's time
        views = [t if t is None else t.numpy() for t in views]
    new, fields, lens, table, last, ring, cell = views
    active = fields[_ACTIVE]
    last[fields[_SEQ_SLOT]] = new
    fields[_TOKEN] = new
    fields[_POSITION] += active
    fields[_DRAW] += active
    lens += active
    position = fields[_POSITION]
    column, last_column = position // block_size, table.shape[1] - 1
    column = np.minimum(column, last_column) if on_host else column.clip(max=last_column)
    block = table[np.arange(len(table)), column] if on_host else table.gather(1, column[:, None])[:, 0]
    fields[_KV_SLOT] = kv_slot(block, position, block_size)
    if ring is not None and cell is not None:
        ring[cell % len(ring), : len(new)] = new
        cell += 1
