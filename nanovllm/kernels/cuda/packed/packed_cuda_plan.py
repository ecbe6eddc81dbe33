"""How the product with a packed weight is cut into blocks of threads. It depends on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_TOKENS = 16
SHARED_BYTES = 72 * 1024
"""Of a block, at most: three blocks have room in a multiprocessor of 228 KB."""
WARP_ROWS = 32
RING_STAGES = 6
"""Steps of a warp whose weights are on their way, in the kernel of ring.cuh; as in packed.cuh. Of Q6_K it is two thirds
of that, which are as many bytes.
"""
RING_FEW_STAGES = 4
"""The same of a plan that has fewer, which then has room for more blocks; as in packed.cuh."""
_RING_SHARED_BYTES = 113 * 1024
"""Of a block of that kernel, at most, with up to 8 warps and 8 tokens: two have room. Others have twice as much."""
WIDE_TOKENS = 128
"""Of the kernel of wide.cuh, at most."""
WIDE_STAGES = 8
"""Steps of a warp whose weights are on their way in that kernel; as in packed.cuh."""
_WIDE_GROUPS = 1 << 17
"""Groups of 128 columns that a weight has at least for that kernel."""
WIDE_FRAGMENTS = 4
"""What `PackedCudaPlan.fragments` is for the kernel of wide.cuh."""
BOX_FRAGMENTS = 8
"""What `PackedCudaPlan.fragments` is for the kernel of box.cuh."""
BOX_WARPS = 16
"""Of a block of the kernel of box.cuh; as in packed.cuh."""
_BOX_STAGES = {"int4": (2, 4), "Q4_K": (3, 3)}
"""Tiles of weights that have room in shared memory there, and of gated products. With 3 of Q4_K a multiprocessor has
room for one block and one of the kernel behind it; with 2 it takes two of the same product, and a layer takes longer.
"""
_BOX_GROUPS = 32
"""Of 128 columns, of a tile there."""
_BOX_STAGE_BYTES = {"int4": 16 * _BOX_GROUPS * (64 + 2) + 16, "Q4_K": 16 * _BOX_GROUPS * (64 + 10) + 16}
"""Weights, their scales, and two barriers."""
_BOX_TOKEN_BYTES = BOX_WARPS * 512
"""x as bytes."""
_BOX_SUMS_BYTES = BOX_WARPS * 16 * 4
"""Of a tile: every warp has a sum of each row."""
_BOX_SHARED_BYTES = 226 * 1024
"""Of a block there, at most."""
_BOX_TIMED_ROWS = range(4096, 24576 + 1)
_BOX_TIMED_GROUPS = range(_BOX_GROUPS, 96 + 1, _BOX_GROUPS)
"""Of 128 columns: whole tiles."""
_ROW_BLOCKS = 2
"""Blocks a multiprocessor from which on few warps share a row."""
_LARGE_ROWS = 16384
"""From which on a product has enough blocks of 64 rows."""
_LONG_GROUPS = 64
"""From which on 8 warps are too few for the columns of two of them."""
_MANY_WAVES_ROWS = 1 << 16
"""From which on a product has many waves of blocks, as an LM head."""
_THREE_BLOCKS_GROUPS = 40
"""Up to which three blocks of 64 rows and 8 warps with the short ring have room for their scales and x."""
_LEAST_STEPS = 4
"""Groups of 128 columns that a split has at least."""


@dataclass(frozen=True)
class PackedCudaPlan:
    """How a product is cut into blocks."""

    row_warps: int
    """Warps of a block with rows of their own; of the kernel of wide.cuh, groups of four. Of the kernel of box.cuh it
    is the number of blocks, which have rows of their own.
    """
    warps: int
    """Of a block: `row_warps` times those that share the columns of a row. In wide.cuh one more copies x."""
    splits: int
    """Blocks that share the columns of the same rows. More than one leave sums, which another kernel adds."""
    fragments: int = 0
    """Of 16 rows, that a warp has in the kernel of ring.cuh, 1 or 2, or a warpgroup in that of wide.cuh, 4. 0: the
    kernel of product.cuh. 8: that of box.cuh.
    """
    stages: int = 0
    """Of the kernel of ring.cuh: `RING_FEW_STAGES`, for Q4_K and one token, or 0: as many as the storage has. Of the
    kernel of wide.cuh: tiles of x, of 128 columns, that have room in shared memory: at least two, four where two pass
    at once, for each group of warps that share columns; a multiple. Of the kernel of box.cuh: tiles of
    weights.
    """


@functools.cache
def plan_packed_cuda(rows: int, groups: int, multiprocessors: int, sums: bool) -> PackedCudaPlan:
    """For a weight of `rows` rows, and 128 times `groups` columns. sums: splits are wanted.

    Of the plans that were tried on an H200, these were within 7 % of the best one at 1 and 8 tokens for the shapes of
    Qwen3-8B, in three forms of storage (docs/log/kernels.md).
    """
    if sums:
        splits = _ROW_BLOCKS * multiprocessors // max(1, -(-rows // (2 * WARP_ROWS)))
        return PackedCudaPlan(2, 8, max(1, min(splits, groups // _LEAST_STEPS)))
    if -(-rows // (2 * WARP_ROWS)) >= _ROW_BLOCKS * multiprocessors:
        return PackedCudaPlan(2, 4, 1)
    return PackedCudaPlan(1, 8, 1)


def turns_of_a_phase(turns: int, bytes_a_turn: int) -> int:
    """For how many turns x is in shared memory at once. Two turns' weights are on their way, so it is even, or all."""
    most = max(2, SHARED_BYTES // bytes_a_turn // 2 * 2)
    return turns if turns <= most else most


def plan_ring(
    kind: str, rows: int, groups: int, tokens: int, multiprocessors: int, sums: bool, small: bool = False
) -> PackedCudaPlan | None:
    """For "int4", "Q4_K" or "Q6_K", where the kernel of ring.cuh was faster on an H200, on the whole, at 1 to 16 tokens
    for the shapes of Qwen3-8B (docs/log/kernels.md); None elsewhere. Of int4 those of up to 8 tokens.

    Args:
        small: a block has at most 99 KiB of shared memory, as of compute capability 12. A ring may take more.
    """
    if small:
        return None
    large = rows >= _LARGE_ROWS
    if tokens == 1:
        if sums and kind == "int4":
            return PackedCudaPlan(1, 8, 1, 1)
        if sums:
            return PackedCudaPlan(2, 12, 1, 1) if groups >= _LONG_GROUPS else PackedCudaPlan(2, 8, 2, 1)
        if kind == "Q6_K" and rows >= _MANY_WAVES_ROWS and groups >= 2 * RING_STAGES:
            # The scales of a block of 64 rows leave room for four blocks, 16 warps. With 16 rows there is room for six,
            # which load more bytes at a time. With fewer waves the next kernel, which starts with the last, is later.
            return PackedCudaPlan(1, 4, 1, 1)
        if kind == "Q4_K" and large and -(-rows // 64) <= 3 * multiprocessors and groups <= _THREE_BLOCKS_GROUPS:
            # All blocks have room at once, three a multiprocessor, so 24 warps; with a longer ring two, in two waves.
            return PackedCudaPlan(4, 8, 1, 1, RING_FEW_STAGES)
        if large:
            return PackedCudaPlan(4, 8 if kind == "int4" else 4, 1, 1)
        return _plan_one_token(rows, groups, multiprocessors) if kind == "Q4_K" else PackedCudaPlan(1, 8, 1, 1)
    if tokens <= 8:
        return _plan_wide_ring(rows, groups, multiprocessors, sums)
    four = kind != "Q6_K"
    if sums:
        return PackedCudaPlan(4, 8, 4, 1 if four else 2)
    if large:
        return None if four else PackedCudaPlan(4, 8, 1, 2)
    return PackedCudaPlan(3, 12, 1, 1)


def plan_stacked_ring(rows: tuple[int, int], groups: int, tokens: int, multiprocessors: int) -> PackedCudaPlan | None:
    """For two weights of these rows in one launch, without sums: up to 8 tokens. None: they have one each."""
    if tokens > 8 or sum(rows) >= _LARGE_ROWS:
        return None
    if tokens == 1:
        return _plan_one_token(sum(rows), groups, multiprocessors)
    blocks = ((warps, sum(-(-n // (16 * warps)) for n in rows)) for warps in (1, 2, 3, 4, 6, 12))
    return PackedCudaPlan(next((w for w, count in blocks if count <= multiprocessors), 12), 12, 1, 1)


def _plan_one_token(rows: int, groups: int, multiprocessors: int) -> PackedCudaPlan:
    """For one token and so few rows that blocks of 16 are about one wave. If a multiprocessor has at least two, blocks
    of 4 warps have enough bytes on their way, and leave room for blocks of the kernel behind, which start early: alone
    such a product is slower by 3 to 5 %, but with what follows it is faster. Of fewer blocks each has to have more.
    """
    small = -(-rows // 16) >= _ROW_BLOCKS * multiprocessors and groups < _LONG_GROUPS
    return PackedCudaPlan(1, 4 if small else 8, 1, 1)


def _plan_wide_ring(rows: int, groups: int, multiprocessors: int, sums: bool) -> PackedCudaPlan | None:
    """Every block copies all of x, so there is one for a multiprocessor, if rows allow that: of 12 warps, with as few
    of its own rows as make no more blocks than that; with sums, of 4 or 6 warps' rows. None: the blocks of sums are
    too few.
    """
    row_blocks = [(warps, -(-rows // (16 * warps))) for warps in (1, 2, 3, 4, 6, 12)]
    if not sums:
        return PackedCudaPlan(next((w for w, blocks in row_blocks if blocks <= multiprocessors), 12), 12, 1, 1)
    for warps, blocks in row_blocks[3:5]:
        splits = max(1, min(multiprocessors // blocks, groups // _LEAST_STEPS))
        if 4 * blocks * splits >= 3 * multiprocessors:
            return PackedCudaPlan(warps, 12, splits, 1)
    return None


def wide_width(tokens: int) -> int:
    """For how many tokens x has room in that kernel; as in packed.cuh."""
    return max(32, 1 << (tokens - 1).bit_length())


def wide_plan(tokens: int, columns: bool, splits: int = 1) -> PackedCudaPlan:
    """A plan of that kernel. columns: the groups of four warps of a block share the columns of 64 rows; else three have
    64 rows each.
    """
    width = wide_width(tokens)
    if columns:
        groups, stages = {32: (3, 12), 64: (3, 6), 128: (2, 4)}[width]
        return PackedCudaPlan(1, 4 * groups + 1, splits, 4, stages)
    return PackedCudaPlan(3, 13, splits, 4, 8 if width <= 64 else 2)


def plan_wide(rows: int, groups: int, tokens: int, multiprocessors: int, sums: bool) -> PackedCudaPlan | None:
    """For int4 and 17 to 128 tokens, where the kernel of wide.cuh was faster on an H200 than Triton's for the shapes of
    Qwen3-8B (docs/log/kernels.md): weights of which blocks of 192 rows keep the multiprocessors busy, or all blocks of
    64 rows at the same time. None elsewhere.
    """
    if rows * groups < _WIDE_GROUPS:
        return None
    blocks, small_blocks = -(-rows // 192), -(-rows // 64)
    if sums:
        splits = max(1, min(multiprocessors // blocks, groups // (2 * _LEAST_STEPS)))
        waves = -(-blocks * splits // multiprocessors)
        return wide_plan(tokens, False, splits) if 3 * blocks * splits >= 2 * waves * multiprocessors else None
    if 4 * blocks >= 3 * multiprocessors * -(-blocks // multiprocessors):
        return wide_plan(tokens, False)
    return wide_plan(tokens, True) if 2 * multiprocessors <= 3 * small_blocks <= 3 * multiprocessors else None


def wide_shared_bytes(plan: PackedCudaPlan, tokens: int) -> int:
    """Of a block of the kernel of wide.cuh: the weights on their way, x, and barriers; at the end sums."""
    groups, width = plan.warps // 4, wide_width(tokens)
    sums = (groups - plan.row_warps) * 64 * width * 4
    return max(groups * WIDE_STAGES * 4096 + plan.stages * (width * 256 + 16), sums)


def box_tiles(rows: int, gated: bool) -> int:
    """Tiles of a weight in the kernel of box.cuh: 16 rows; gated: 8 rows of each half."""
    return -(-(rows // 2) // 8) if gated else -(-rows // 16)


def box_plan(
    rows: int, multiprocessors: int, gated: bool, stages: int | None = None, kind: str = "int4"
) -> PackedCudaPlan:
    """One block on each of the multiprocessors, or a multiple, so that a block has room for the sums of its tiles.
    kind: "int4" or "Q4_K".
    """
    tiles = box_tiles(rows, gated)
    stages = stages or _BOX_STAGES[kind][gated]
    most = (_BOX_SHARED_BYTES - stages * _BOX_STAGE_BYTES[kind] - _BOX_TOKEN_BYTES) // _BOX_SUMS_BYTES
    waves = -(-tiles // (multiprocessors * most))
    return PackedCudaPlan(min(tiles, waves * multiprocessors), BOX_WARPS, 1, BOX_FRAGMENTS, stages)


def box_shared_bytes(plan: PackedCudaPlan, tiles: int, kind: str = "int4") -> int:
    """Of a block of the kernel of box.cuh: the weights on their way, x, and the sums of warps."""
    sums = -(-tiles // plan.row_warps) * _BOX_SUMS_BYTES
    return plan.stages * _BOX_STAGE_BYTES[kind] + _BOX_TOKEN_BYTES + sums


def plan_boxes(kind: str, rows: int, groups: int, multiprocessors: int, gated: bool) -> PackedCudaPlan | None:
    """For "int4" or "Q4_K" and one token, where the kernel of box.cuh was faster on an H200 than that of ring.cuh in
    layers of Qwen3-8B's shape (docs/log/kernels.md). None elsewhere, also for weights smaller or larger than were
    timed.
    """
    if rows not in _BOX_TIMED_ROWS or groups not in _BOX_TIMED_GROUPS:
        return None
    return box_plan(rows, multiprocessors, gated, kind=kind)


@dataclass(frozen=True)
class ScalePlane:
    """Scales or minima of a row that lie next to each other."""

    bytes: int
    """Of an element."""
    shift: int
    """2^shift steps share an element; below 0: a step has 2^-shift of them."""

    def room(self, steps: int) -> int:
        """Bytes for the elements of this number of steps, copied in pieces of 16 bytes wherever they begin."""
        elements = (steps >> self.shift) + 2 if self.shift > 0 else steps << -self.shift
        return -(-(elements * self.bytes + 16 - self.bytes) // 16) * 16


@dataclass(frozen=True)
class Phases:
    """What a block of the kernel of ring.cuh has in shared memory."""

    turns: int
    """Of a phase: as long, x and the scales are in shared memory. In a turn every warp takes a step."""
    panel: tuple[int, ...]
    """Where the four planes of a row begin, and the bytes of such a row: an odd number of pieces of 16 bytes, so that
    eight rows are in different banks.
    """
    shared_bytes: int
    section_bytes: int = 0
    """Of the scales of a row, all of which are there as they are stored. 0: those of a phase are, plane by plane."""


@functools.cache
def phases_of(
    plan: PackedCudaPlan,
    turns: int,
    tokens: int,
    step_columns: int,
    planes: tuple[ScalePlane | None, ...],
    section: tuple[int, ...] = (),
) -> Phases:
    """The longest phases that have room, of at most `turns` turns.

    Args:
        section: where the four planes begin in the part of a row that they are, a multiple of 16 bytes, and its bytes.
            With up to 8 tokens one phase has all of it, if there is room.

    Raises:
        ValueError: not even one turn has room.
    """
    column_warps, rows = plan.warps // plan.row_warps, plan.row_warps * plan.fragments * 16
    stages = plan.stages or RING_STAGES
    fixed = plan.warps * stages * plan.fragments * 1024 + tokens * 64  # the ring; between the rows of x
    sums = (column_warps - 1) * rows * -(-tokens // 8) * 8 * 4
    limit = _RING_SHARED_BYTES * (2 if tokens > 8 or plan.warps > 8 else 1)
    if section and tokens <= 8:
        whole = (*section[:4], section[4] if section[4] // 16 % 2 else section[4] + 16)
        needed = fixed + rows * whole[4] + turns * column_warps * tokens * step_columns * 2
        if needed <= limit:
            return Phases(turns, whole, max(needed, sums), section[4])
    for count in range(turns, 0, -1):
        ends = [0]
        for plane in planes:
            ends.append(ends[-1] + (plane.room(count * column_warps) if plane else 0))
        panel = (*ends[:4], ends[4] if ends[4] // 16 % 2 else ends[4] + 16)
        needed = fixed + rows * panel[4] + count * column_warps * tokens * step_columns * 2
        if needed <= limit:
            return Phases(count, panel, max(needed, sums))
    raise ValueError(f"{plan}: a turn of {tokens} tokens needs {needed} bytes of shared memory; {limit} are there")
