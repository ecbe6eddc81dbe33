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

import numpy as np
import torch

from nanovllm.engine.batch import DeviceBatch, resolve_tokens
from nanovllm.engine.fast.decode_rows import Int32, Int64, advance_rows, num_update_words, padding_row, update_parts
from nanovllm.engine.fast.prefix_groups import PrefixGroups
from nanovllm.engine.fast.step_shape import SamplingMode
from nanovllm.engine.fast.token_ring import TokenRing
from nanovllm.engine.kv_cache import kv_slot
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sampler import PackedSampling, SamplingRow
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledSequence, ScheduledStep
from nanovllm.engine.token_masks import ConstrainedRow


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
        max_num_seqs, device = paged.max_num_seqs, paged.device
        self.prefixes, self.ring = prefixes, ring
        self.block_size = paged.block_size
        self._paged = paged
        self._advance = advance or advance_rows
        self._padding = padding_row(paged.padding_block, self.block_size, max_num_seqs)
        int64, int32 = (torch.from_numpy(fields)[:, None].repeat(1, max_num_seqs) for fields in self._padding)
        self.int64_fields, self.int32_fields = int64.to(device), int32.to(device)
        """The fields of every row on the device, [number of fields, max_num_seqs]; steps read and advance them."""
        self._float_fields = self.int32_fields.view(torch.float32)
        tables = (max_num_seqs, paged.max_blocks)
        self._block_table = torch.full(tables, paged.padding_block, dtype=torch.int32, device=device)
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
        rows_changed, to_send = False, []
        if step.continues:
            n = self.num_rows
            if (self._positions[:n] // self.block_size >= self._num_blocks[:n]).any():  # a row lacks its next block
                to_send = np.flatnonzero(_table_lengths(self.seqs) > self._num_blocks[:n]).tolist()
        else:
            rows_changed, to_send = self._place_anew(step.sampling_parts)
        if to_send:
            self.send(to_send)
        if rows_changed and self.prefixes is not None:
            self.prefixes.update(self.num_rows, self._positions)
        return self._rows

    def _place_anew(self, parts: tuple[ScheduledSequence, ...]) -> tuple[bool, list[int]]:
        """Update the mirror for a step of these decodes.

        Returns:
            (whether another sequence has one of the rows or their number has changed, the rows to send).
        """
        n, before = len(parts), self.num_rows
        seq_slots = np.fromiter((p.seq_slot for p in parts), np.int64, n)
        positions = np.fromiter((p.start for p in parts), np.int64, n)
        rows, keeps_row = self._choose_rows(seq_slots)
        # What the device has of these rows: another sequence, another position, or no block for the position.
        wrong_position = self._positions[rows] != positions
        lacks_block = positions // self.block_size >= self._num_blocks[rows]
        must_send = ~keeps_row | wrong_position | lacks_block
        if must_send.any() or n < before:  # something is sent, so blocks reserved ahead go with it
            must_send |= _table_lengths(p.seq for p in parts) > self._num_blocks[rows]
        # From here on the mirror is what the step needs.
        owned = self._seq_slot_of_row[self._seq_slot_of_row >= 0]
        self._row_of_seq_slot[owned] = -1
        self._seq_slot_of_row[:] = -1
        self._row_of_seq_slot[seq_slots] = rows
        self._seq_slot_of_row[rows] = seq_slots
        self._positions[rows] = positions
        for i in np.flatnonzero(must_send).tolist():
            self._assign(int(rows[i]), parts[i].seq)
        for row in range(n, before):  # these become padding
            self._seqs[row] = None
        self.num_rows, self._rows = n, rows
        self._constrained_rows = np.flatnonzero(self._constrained[:n]).tolist()
        return n != before or not keeps_row.all(), [*rows[must_send].tolist(), *range(n, before)]

    def _choose_rows(self, seq_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the row of each sequence, whether it has this row already).

        With n sequences the rows are 0 to n - 1. A sequence keeps its row if that is one of these; the others get the
        rows that are free. Example: sequences have rows 0, 1 and 2, and the one of row 0 ends; then the one of row 2
        gets row 0.
        """
        n = len(seq_slots)
        rows = self._row_of_seq_slot[seq_slots]
        keeps_row = (0 <= rows) & (rows < n)
        free = np.ones(n, bool)
        free[rows[keeps_row]] = False
        rows[~keeps_row] = np.flatnonzero(free)
        return rows, keeps_row

    def _assign(self, row: int, seq: Sequence) -> None:
        """The row is the sequence's: note what its sampling needs."""
        params = seq.params
        self._seqs[row] = seq
        bans = seq.stop_ids and seq.constraint is None  # the mask of a constraint has these bans
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
        placed = [(i, row, seq) for i, row in enumerate(rows) if (seq := self._seqs[row]) is not None]
        num_blocks = max((len(seq.block_table) for _, _, seq in placed), default=1)
        shape = (len(rows), num_update_words(num_blocks))
        host = torch.empty(shape, dtype=torch.int64, pin_memory=paged.device.type == "cuda")
        # First every update is that of a padding row.
        numbers, int64, int32, tables = update_parts(host.numpy(), np.int32)
        numbers[:] = rows
        int64[:], int32[:, : Int32.COUNT] = self._padding
        tables[:] = paged.padding_block
        # Then those of sequences get what the sequence computes next,
        sampling: list[SamplingRow] = []
        for i, row, seq in placed:
            table, position = seq.block_table, int(self._positions[row])
            seq_slot = int(self._seq_slot_of_row[row])
            # A token that the host does not know yet is in its seq_slot on the device.
            int64[i, Int64.TOKEN] = seq.token_ids[position] if position < len(seq.token_ids) else -1 - seq_slot
            int64[i, Int64.POSITION] = position
            int64[i, Int64.KV_SLOT] = kv_slot(table[position // self.block_size], position, self.block_size)
            int64[i, Int64.ACTIVE] = 1
            int32[i, Int32.CONTEXT_LEN] = position + 1
            tables[i, : len(table)] = table
            self._num_blocks[row] = len(table)
            if self.prefixes is not None:
                self.prefixes.set_table(row, tables[i, : len(table)])
            sampling.append(SamplingRow(seq.params, seq.seed, position + 1, seq_slot))
        # and, all at once, their sampling parameters.
        if placed:
            indices = [i for i, _, _ in placed]
            packed = PackedSampling.of(sampling)
            int64[indices, Int64.SEED], int64[indices, Int64.DRAW], int64[indices, Int64.SEQ_SLOT] = packed.draws
            int32.view(np.float32)[indices, Int32.TEMPERATURE : Int32.MIN_P + 1] = packed.floats[:3].T
            int32[indices, Int32.TOP_K] = packed.top_k
        self._apply(host.to(paged.device, non_blocking=True), num_blocks)

    def _apply(self, updates: torch.Tensor, num_blocks: int) -> None:
        """On the device: copy each row update to its row. num_blocks: of the longest block table among them."""
        rows, int64, int32, tables = update_parts(updates, torch.int32)
        tokens = resolve_tokens(int64[:, Int64.TOKEN], self._paged.last_tokens)
        self.int64_fields.index_copy_(1, rows, int64.T)
        self.int64_fields[Int64.TOKEN].index_copy_(0, rows, tokens)
        self.int32_fields.index_copy_(1, rows, int32[:, : Int32.COUNT].T)
        self._block_table[:, :num_blocks].index_copy_(0, rows, tables[:, :num_blocks])

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
        int64, context_lens, block_table, _ = self._views(num_rows)
        tokens = int64[: Int64.KV_SLOT + 1]  # token ids, positions, kv_slots
        groups = self.prefixes.tensors(num_rows) if shared and self.prefixes is not None else None
        return DeviceBatch.from_tensors(tokens, context_lens, block_table, max_context_len, shared=groups)

    def _views(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Of the first rows, kept over steps: int64 fields, context lengths, block table, sampling arguments."""
        if self._cached_views is None or self._cached_views[1].shape[0] != num_rows:
            fields = self.int64_fields, self.int32_fields, self._float_fields
            int64, int32, floats = (t[:, :num_rows] for t in fields)
            sampling = (
                floats[Int32.TEMPERATURE], int32[Int32.TOP_K], floats[Int32.TOP_P], floats[Int32.MIN_P],
                int64[Int64.SEED], int64[Int64.DRAW],
            )  # fmt: skip
            self._cached_views = int64, int32[Int32.CONTEXT_LEN], self._block_table[:num_rows], sampling
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

    def tokens(self) -> torch.Tensor:
        """[num_seqs] int64: each row's latest token. A view of the ring's cell; without a ring, of what the next
        step overwrites.
        """
        tokens = self.int64_fields[Int64.TOKEN] if self.ring is None else self.ring.latest()
        return tokens[: self.num_rows]


def _table_lengths(seqs: Iterable[Sequence]) -> np.ndarray:
    return np.fromiter((len(seq.block_table) for seq in seqs), np.int64)
