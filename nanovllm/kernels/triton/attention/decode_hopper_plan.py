"""Plans of decode attention for Hopper: how a batch is cut, tiles in shared memory, warps, clusters."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from nanovllm.kernels.triton.launch_arguments import cdiv

_BARRIERS = 4096
_SHARED = (227 << 10) - _BARRIERS
"""Bytes of shared memory for tiles: what a program may have on Hopper, but for barriers, scratch and alignment."""
_EXCHANGED = 20 << 10
"""Bytes at most of the partial results that a cluster exchanges: 8 blocks with 4 queries a KV head, 16 with 2."""


@dataclass(frozen=True)
class HopperDecodePlan:
    """As `DecodePlan`, for `decode_hopper_kernel`."""

    pieces: int
    """The batch is cut into pieces of 1 / `pieces` of its tokens, or shorter where a sequence is."""
    least: int = 1
    """Tiles that no sequence is cut below."""
    warps: int = 4
    """Warps of a program. Each has 16 keys of a tile."""
    slots: int = 2
    """Tiles in shared memory at a time; with a new token all of them are asked for before the wait."""
    box: int = 16
    """Keys a request to the copy engine: fewer than that are read beyond a sequence's last token."""
    chunk: int = 4
    """Partial results that are merged at a time."""
    empty_last: bool = False
    """Whether programs that find no piece come last in the grid."""
    cluster: int = 0
    """Blocks of a cluster: a sequence whose pieces are all of one merges them there, the others through global memory.
    One sequence alone is cut into as many, if they are then short. 0: no clusters."""

    @property
    def tile(self) -> int:
        """KV tokens a step."""
        return 16 * self.warps

    def shared_memory(self, head_dim: int, cache_itemsize: int = 2) -> int:
        """Bytes, but for barriers."""
        return 2 * self.slots * self.tile * head_dim * cache_itemsize

    def exchange(self, head_dim: int, group: int) -> int:
        """Bytes of shared memory for the partial results of a cluster."""
        return cdiv(16 + self.cluster * group * (head_dim + 2) * 4, 1024) * 1024 if self.cluster else 0

    def programs(self, num_seqs: int, max_context_len: int) -> int:
        """The number of programs of a KV head for any lengths up to max_context_len: at least one for each piece."""
        pieces = min(num_seqs - 1 + self.pieces, num_seqs * max(1, cdiv(max_context_len, self.tile)))
        return cdiv(pieces, self.cluster) * self.cluster if self.cluster else pieces

    def refused(self, head_dim: int, block_size: int, cache_itemsize: int = 2, group: int = 8) -> str | None:
        """Why there is no kernel for this plan, if there is none."""
        if self.warps not in (1, 2, 4, 8) or block_size % self.tile:
            return f"warps: expected 1, 2, 4 or 8, and 16 times that to divide blocks of {block_size}, not {self.warps}"
        if self.box not in (8, 16, 32, 64, 128) or self.box > self.tile:
            return f"box: expected 8, 16, ... up to a tile, {self.tile}, not {self.box}"
        if not 0 < self.pieces < 2**14:
            return f"pieces: expected 1 to {2**14 - 1}, not {self.pieces}"
        if self.least < 1 or self.slots < 1:
            return f"least, slots: expected at least 1, not {self.least} and {self.slots}"
        if self.chunk not in (1, 2, 4, 8):
            return f"chunk: expected 1, 2, 4 or 8, not {self.chunk}"
        if self.cluster not in (0, 2, 4, 8, 16):
            return f"cluster: expected 0, 2, 4, 8 or 16, not {self.cluster}"
        exchange = self.exchange(head_dim, group)
        if exchange > _EXCHANGED:
            return f"cluster: {exchange} bytes of partial results, more than {_EXCHANGED}"
        size = self.shared_memory(head_dim, cache_itemsize)
        if size > _SHARED - exchange:
            return f"slots: {size} bytes of tiles, more than {_SHARED - exchange} of shared memory"
        if size < 48 << 10 < size + exchange + _BARRIERS and exchange:
            what = f"with the exchange of a cluster {size} bytes of tiles"
            return f"slots: {what} are more than the 48 KiB that need no asking for"
        return None


_Table: TypeAlias = "tuple[tuple[int | None, tuple[Any, ...]], ...]"

# The first number is the most sequences of eight KV heads. Then: programs a multiprocessor that the batch is cut for,
# the tiles that no sequence is cut below, warps, slots, box, chunk, whether programs without a piece come last, and
# blocks of a cluster. Measured on an H200 in whole layers of Qwen3-0.6B, with sequences of 170 to 16,384 tokens. Up to
# 8 sequences all programs are resident at once, one or two a multiprocessor, also if a sequence has a piece more than
# its share: so they are cut for fewer than would fit (of 100 batches of 8 random lengths about one has too many). From
# 17 to 99 sequences they are too, with as much shared memory as that leaves each, but where each sequence is cut in
# two. Half a program: no sequence is cut, unless it is very long, and the grid has few programs that find no piece.
_MEASURED: _Table = (
    (2, (1.0, 1, 4, 4, 32, 8)),
    (4, (1.85, 1, 4, 3, 32, 8)),
    (8, (1.7, 1, 4, 3, 32, 8)),
    (16, (2.0, 4, 4, 3, 32, 8, True)),
    (33, (0.5, 1, 2, 5, 32, 8)),
    (49, (3.0, 4, 2, 4, 32, 4)),
    (66, (3.0, 8, 2, 3, 32, 4)),
    (99, (0.5, 1, 2, 2, 32, 4)),
    (132, (0.5, 1, 2, 3, 32, 4)),
    (None, (1.0, 1, 4, 2, 16, 4)),
)
# The same for a float8 cache, whose tiles have half the bytes: four programs a multiprocessor. Measured from 8
# sequences on.
_FLOAT8: _Table = (
    (4, (2.0, 2, 4, 2, 32, 8)),
    (99, (1.0, 4, 4, 2, 32, 4)),
    (132, (2.0, 8, 1, 6, 16, 4)),
    (None, (1.0, 4, 4, 2, 32, 4)),
)


# The same up to 8 sequences for calls whose last token is in the cache, so that nothing is asked for before the wait.
# One sequence in rows of such calls takes 4.9, 9.2 and 35.0 us (H200; 512, 4,096 and 32,768 tokens), and 5.8, 10.6 and
# 38.4 in twice as many pieces. Eight of 1,024 tokens, 32/8 heads, take 12.4 where 66 pieces without clusters took 14.4.
_CACHED: _Table = (
    (1, (1.0, 1, 4, 2, 32, 8)),
    (4, (2.0, 2, 4, 3, 32, 8)),
    (8, (1.0, 1, 4, 2, 32, 2, True, 2)),
)


@functools.cache
def plan_hopper_decode(
    num_seqs: int, num_kv_heads: int, head_dim: int, multiprocessors: int, cache_itemsize: int = 2, new: bool = True,
    group: int = 8, table: _Table | None = None,
) -> HopperDecodePlan:  # fmt: skip
    """As the tables say for as many sequences and heads; with head_dim 64 there are more slots, of half the bytes.

    Args:
        new: whether the last token comes with the call.
        group: query heads a KV head. Where their partial results are too large for a cluster to exchange, there is
            none.
        table: in place of what was measured.
    """
    alike = cdiv(num_seqs * num_kv_heads, 8)
    if table is None:
        table = _FLOAT8 if cache_itemsize == 1 else _MEASURED
        if not new and cache_itemsize == 2:
            table = *_CACHED, *table
    programs, least, warps, slots, box, *rest = next(row for most, row in table if most is None or alike <= most)
    pieces = max(1, int(programs * multiprocessors) // num_kv_heads)
    plan = HopperDecodePlan(pieces, least, warps, slots if head_dim > 64 else min(8, 2 * slots), box, *rest)
    if 2 * plan.shared_memory(head_dim, cache_itemsize) > _SHARED:
        # One program a multiprocessor, for each of which a second round would double the time: every sequence may have
        # a piece more.
        plan = replace(plan, pieces=max(1, min(pieces, multiprocessors // num_kv_heads - num_seqs + 1)))
    return replace(plan, cluster=0) if plan.cluster and plan.refused(head_dim, 64, cache_itemsize, group) else plan
