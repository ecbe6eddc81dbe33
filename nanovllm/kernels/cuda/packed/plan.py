"""How the product with a packed weight is cut into blocks of threads. It depends on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_TOKENS = 16
SHARED_BYTES = 72 * 1024
"""Of a block, at most: three blocks have room in a multiprocessor of 228 KB."""
WARP_ROWS = 32
_ROW_BLOCKS = 2
"""Blocks a multiprocessor from which on few warps share a row."""
_LEAST_STEPS = 4
"""Groups of 128 columns that a split has at least."""


@dataclass(frozen=True)
class PackedCudaPlan:
    """How a product is cut into blocks."""

    row_warps: int
    """Warps of a block with rows of their own."""
    warps: int
    """Of a block: `row_warps` times those that share the columns of a row."""
    splits: int
    """Blocks that share the columns of the same rows. More than one leave sums, which another kernel adds."""


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
