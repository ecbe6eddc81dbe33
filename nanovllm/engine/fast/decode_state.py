"""The decode state on the device: one row for each sequence that decodes, advanced by the step itself.

Inputs, cache addresses and sampling parameters of a row stay where they are from step to step; after sampling, `advance`
moves every row on by one token. The host keeps a mirror of what a row holds, and sends a *record* (one row's complete
state) only where the two differ: a sequence came, another took its row, or it needs a block that the device does not know
of. All records of a step travel in one copy from pinned memory, and with them those of all other rows whose block table grew
(blocks are reserved ahead), so that most steps send nothing. A row that no sequence has is a *padding row*: it computes one token in a block that
nobody owns, and never advances.

Everything here runs on CPU tensors too; on a GPU `advance` may be a Triton kernel, and is part of the captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from enum import IntEnum

import numpy as np
import torch

from nanovllm.engine.batch import DeviceBatch, resolve_tokens
from nanovllm.engine.fast.prefix_groups import PrefixGroups
from nanovllm.engine.fast.token_ring import TokenRing
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep

# A record: its row, the int64 fields, the int32 fields (two a word), the block table (two a word).
_TOKEN, _POSITION, _CACHE_SLOT, _DRAW, _SEED, _SLOT, _ACTIVE, _NUM_INTS = range(8)
_CONTEXT_LEN, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P, _NUM_SMALL = range(6)
_FIRST_SMALL = 1 + _NUM_INTS
_FIRST_BLOCK = _FIRST_SMALL + (_NUM_SMALL + 1) // 2


class SamplingMode(IntEnum):
    """What sampling a batch needs: what its most demanding row needs."""

    GREEDY = 0
    PLAIN = 1
    """Temperature."""
    FILTERED = 2
    """top-k, top-p or min-p as well."""
    GENERAL = 3
    """Penalties, banned tokens or log-probabilities, which the state has no place for."""


class DecodeState:
    """The rows, their mirror on the host, and the last token of every slot.

    Args:
        max_num_seqs: number of rows, and of the scheduler's slots.
        max_blocks: columns of the block table.
        padding_block: a block that no sequence owns.
        advance: what moves rows on; `advance_rows` or a kernel with its arguments.
        prefixes: keeps count of who shares leading blocks; None: nobody asks.
        ring: what `advance` leaves the tokens in for the host; None: the host copies them.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        padding_block: int,
        device: torch.device,
        advance: Callable[..., None] | None = None,
        prefixes: PrefixGroups | None = None,
        ring: TokenRing | None = None,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.prefixes = prefixes
        self.ring = ring
        self.block_size = block_size
        self.padding_block = padding_block
        self.device = device
        self._advance = advance or advance_rows
        self._ints = torch.zeros(_NUM_INTS, max_num_seqs, dtype=torch.int64, device=device)
        self._ints[_CACHE_SLOT] = padding_block * block_size
        self._ints[_SLOT] = max_num_seqs
        self._small = torch.zeros(_NUM_SMALL, max_num_seqs, dtype=torch.int32, device=device)
        self._small[_CONTEXT_LEN] = 1
        self._floats = self._small.view(torch.float32)
        self._block_table = torch.full((max_num_seqs, max_blocks), padding_block, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        """[max_num_seqs + 1] int64: the token last sampled in each slot; the last entry is the padding rows'."""

        self.num_rows = 0
        """Rows that sequences have: the first ones."""
        self._seqs: list[Sequence | None] = [None] * max_num_seqs
        self._row_of_slot = np.full(max_num_seqs, -1)
        self._slot_of_row = np.full(max_num_seqs, -1)
        self._positions = np.zeros(max_num_seqs, np.int64)  # of the token that the row computes next
        self._num_blocks = np.zeros(max_num_seqs, np.int64)  # entries of its block table that the device has
        self._modes = np.zeros(max_num_seqs, np.int64)
        self._bans_end = np.zeros(max_num_seqs, np.int64)  # from this position on nothing is banned
        self._rows = np.zeros(0, np.int64)

    # ---------------------------------------------------------------------------------------------- before a step

    def forget(self, slot: int) -> None:
        """The slot has a new owner."""
        row = self._row_of_slot[slot]
        if row >= 0:
            self._row_of_slot[slot] = self._slot_of_row[row] = -1
            self._positions[row] = -1

    def reset(self) -> None:
        """Nothing is known of the device's rows, since a step failed: all of them are sent before they are used again."""
        self._row_of_slot[:] = self._slot_of_row[:] = self._positions[:] = -1
        self.num_rows = len(self._seqs)
        if self.prefixes is not None:
            self.prefixes.reset()
        if self.ring is not None:
            self.ring.reset()

    def place(self, step: ScheduledStep) -> np.ndarray:
        """Give every sequence of a step that only decodes a row, and make the device's rows what the step needs.

        Returns:
            [num_seqs] int64: the row of each part. Together they are rows 0 .. num_seqs - 1.
        """
        if self.ring is not None:
            self.ring.claim()
        if step.continues:
            n = self.num_rows
            changed, moved = [], False
            if (self._positions[:n] // self.block_size >= self._num_blocks[:n]).any():
                changed = np.flatnonzero(_table_lengths(self._seqs[:n]) > self._num_blocks[:n]).tolist()
        else:
            changed, moved = self._place_anew(step)
        if changed:
            self._send(changed)
        if moved and self.prefixes is not None:
            self.prefixes.update(self.num_rows, self._positions)
        return self._rows

    def _place_anew(self, step: ScheduledStep) -> tuple[list[int], bool]:
        """(rows to send, whether another sequence has one of the rows or their number has changed)"""
        parts = step.parts
        n, before = len(parts), self.num_rows
        slots = np.fromiter((p.slot for p in parts), np.int64, n)
        starts = np.fromiter((p.start for p in parts), np.int64, n)
        rows = self._row_of_slot[slots]
        keeps = (0 <= rows) & (rows < n)
        free = np.ones(n, bool)
        free[rows[keeps]] = False
        rows[~keeps] = np.flatnonzero(free)
        here = ~keeps | (self._positions[rows] != starts) | (starts // self.block_size >= self._num_blocks[rows])
        if here.any() or n < before:  # something is sent: what grew goes with it
            here |= _table_lengths(p.seq for p in parts) > self._num_blocks[rows]
        owned = self._slot_of_row[self._slot_of_row >= 0]
        self._row_of_slot[owned] = -1
        self._slot_of_row[:] = -1
        self._row_of_slot[slots] = rows
        self._slot_of_row[rows] = slots
        self._positions[rows] = starts
        for i in np.flatnonzero(here).tolist():
            self._take(int(rows[i]), parts[i].seq)
        for row in range(n, before):
            self._seqs[row] = None
        self.num_rows, self._rows = n, rows
        return [*rows[here].tolist(), *range(n, before)], n != before or not keeps.all()

    def _take(self, row: int, seq: Sequence) -> None:
        params = seq.params
        self._seqs[row] = seq
        self._bans_end[row] = seq.prompt_len + min(params.min_tokens, 2**31) if seq.stop_ids else 0
        if params.uses_penalties or params.logprobs is not None:
            self._modes[row] = SamplingMode.GENERAL
        elif params.greedy:
            self._modes[row] = SamplingMode.GREEDY
        else:
            self._modes[row] = SamplingMode.FILTERED if params.uses_filters else SamplingMode.PLAIN

    def _send(self, rows: list[int]) -> None:
        """Write the records of some rows, and copy them to the device without waiting."""
        seqs = [self._seqs[row] for row in rows]
        num_blocks = max((len(seq.block_table) for seq in seqs if seq is not None), default=1)
        shape = (len(rows), _FIRST_BLOCK + (num_blocks + 1) // 2)
        host = torch.empty(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        record = host.numpy()
        small = record[:, _FIRST_SMALL:_FIRST_BLOCK].view(np.int32)
        floats = small.view(np.float32)
        blocks = record[:, _FIRST_BLOCK:].view(np.int32)
        blocks[:] = self.padding_block
        for i, (row, seq) in enumerate(zip(rows, seqs)):
            if seq is None:
                record[i, :_FIRST_SMALL] = (row, 0, 0, self.padding_block * self.block_size, 0, 0, len(self._seqs), 0)
                small[i, : _TEMPERATURE + 1] = (1, 0, 0)  # a temperature of 0 is the cheapest
                floats[i, _TOP_P : _MIN_P + 1] = (1, 0)
                continue
            params, table = seq.params, seq.block_table
            position = int(self._positions[row])
            slot = int(self._slot_of_row[row])
            # A token that the host does not know yet is in its slot on the device.
            token = seq.token_ids[position] if position < len(seq.token_ids) else -1 - slot
            cache_slot = table[position // self.block_size] * self.block_size + position % self.block_size
            seed = (seq.seed + 2**63) % 2**64 - 2**63  # the same 64 bits, signed
            record[i, :_FIRST_SMALL] = (row, token, position, cache_slot, position + 1, seed, slot, 1)
            small[i, : _TOP_K + 1] = (position + 1, min(params.top_k, 2**31 - 1))
            # A temperature beyond float32 stays finite: logit / inf would be NaN for a logit of -inf.
            temperature = min(params.temperature, float(np.finfo(np.float32).max))
            floats[i, _TEMPERATURE : _MIN_P + 1] = (temperature, params.top_p, params.min_p)
            blocks[i, : len(table)] = table
            self._num_blocks[row] = len(table)
            if self.prefixes is not None:
                self.prefixes.set_table(row, blocks[i, : len(table)])
        self._write(host.to(self.device, non_blocking=True), num_blocks)

    def _write(self, records: torch.Tensor, num_blocks: int) -> None:
        rows = records[:, 0]
        tokens = resolve_tokens(records[:, 1 + _TOKEN], self.last_tokens)
        self._ints.index_copy_(1, rows, records[:, 1:_FIRST_SMALL].T)
        self._ints[_TOKEN].index_copy_(0, rows, tokens)
        small = records[:, _FIRST_SMALL:_FIRST_BLOCK].view(torch.int32)
        self._small.index_copy_(1, rows, small[:, :_NUM_SMALL].T)
        blocks = records[:, _FIRST_BLOCK:].view(torch.int32)
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
    def seqs(self) -> Several[Sequence]:
        """The placed sequences by row."""
        return self._seqs[: self.num_rows]

    def positions(self) -> list[int]:
        """By row: the position of the token that the step computes."""
        return self._positions[: self.num_rows].tolist()

    def slots(self) -> list[int]:
        """By row: the sequence's slot."""
        return self._slot_of_row[: self.num_rows].tolist()

    # ---------------------------------------------------------------------------------------------- on the device

    def batch(self, num_rows: int, max_context_len: int, shared: bool = False) -> DeviceBatch:
        """What the model's forward takes, for the first `num_rows` rows: views, so that a captured graph stays right.

        shared: with the groups that `prefixes` keeps.
        """
        return DeviceBatch.from_tensors(
            self._ints[: _CACHE_SLOT + 1, :num_rows],
            self._small[_CONTEXT_LEN, :num_rows],
            self._block_table[:num_rows],
            max_context_len,
            shared=self.prefixes.tensors(num_rows) if shared else None,
        )

    def sampling_arguments(self, num_rows: int, filtered: bool) -> tuple[torch.Tensor | None, ...]:
        """What the op `sample` takes after the logits, for the first `num_rows` rows: views, as in `batch`."""
        filters = (self._small[_TOP_K], self._floats[_TOP_P], self._floats[_MIN_P])
        return (
            self._floats[_TEMPERATURE, :num_rows],
            *(f[:num_rows] if filtered else None for f in filters),
            self._ints[_SEED, :num_rows],
            self._ints[_DRAW, :num_rows],
        )

    def advance(self, tokens: torch.Tensor) -> None:
        """On the device: the first len(tokens) rows continue with these tokens [n] int64; padding rows stay."""
        n = len(tokens)
        self._advance(
            tokens,
            self._ints[:, :n],
            self._small[_CONTEXT_LEN, :n],
            self._block_table[:n],
            self.last_tokens,
            self.block_size,
            *(() if self.ring is None else (self.ring.tokens, self.ring.count)),
        )

    def advanced(self) -> None:
        """On the host: every placed row was advanced."""
        self._positions[: self.num_rows] += 1
        if self.ring is not None:
            self.ring.advanced()

    def tokens(self) -> torch.Tensor:
        """[num_seqs] int64: each row's latest token; a view of the ring's cell, or, without a ring, of what the next step overwrites."""
        tokens = self._ints[_TOKEN] if self.ring is None else self.ring.latest()
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
    """Move rows on by one token, in place; the reference of `kernels.triton_ops.sampling_advance`.

    Args:
        tokens: [n] int64, what was sampled.
        ints: [7, n] int64: each row's token, its position and its cache slot; the position of the next draw; seed; slot;
            and 1, or 0 for padding, whose position stays.
        context_lens: [n] int32.
        block_table: [n, max_blocks] int32. Where the next token needs a block that the table does not have yet, the cache
            slot is wrong until the host has sent it.
        last_tokens: [max_num_seqs + 1] int64, by slot.
        host_tokens, count: [depth, max_num_seqs] and [1] int64, both or none: row count % depth takes the tokens, and count grows
            by one. See `TokenRing`; the reference needs both on one device.
    """
    active = ints[_ACTIVE]
    last_tokens[ints[_SLOT]] = tokens
    ints[_TOKEN] = tokens
    ints[_POSITION] += active
    ints[_DRAW] += active
    context_lens += active
    position = ints[_POSITION]
    column = (position // block_size).clamp_(max=block_table.shape[1] - 1)
    block = block_table.gather(1, column[:, None])[:, 0]
    ints[_CACHE_SLOT] = block * block_size + position % block_size
    if host_tokens is not None:
        host_tokens[count % len(host_tokens), : len(tokens)] = tokens
        count += 1
