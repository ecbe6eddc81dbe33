"""How the product with a weight of 8-bit floats is cut into blocks of threads. It depends on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_TOKENS, CHUNK, STAGES = 8, 256, 2
"""As in interface.cuh."""
HELD_STAGES, BUFFERS, WARP_SUMS = 3, 4, 512
"""As in held.cuh."""
HELD_WARPS = 16
"""Of a block at most, where x is held in registers."""
LEAST_COLUMNS = 4096
"""Of a weight for which the kernel is used. Shorter rows were not timed: some warps would have no chunk."""
TILE_ROWS = 16
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, with 1 KiB for each block that the driver takes."""
_SUMS_PITCH = 20
_MOST_X = 64 * 1024
"""Bytes of x in a block beyond which columns are split. In a chain of Qwen3-8B's products with 8 tokens on an H200, one
split of 4,096 columns and three of 12,288 were the fastest of 36 plans (docs/log/kernels.md).
"""


@dataclass(frozen=True)
class Fp8CudaPlan:
    """How a product is cut into blocks."""

    splits: int = 1
    """Blocks that share the columns of the same rows. More than one leave sums, which another kernel adds."""
    warps: int = 8
    """Of a block; they share the columns of its rows."""
    turns: int = 0
    """Chunks of columns of a warp, whose x it holds in registers; 0: x is in shared memory."""


@functools.cache
def plan_held(tiles: int, size: int, sums: bool, multiprocessors: int) -> Fp8CudaPlan | None:
    """The plan that holds x in registers; None if the columns are too many for one block, and sums are not wanted.

    tiles: of 16 rows of the weight. With few of them more blocks share columns, down to two chunks each.
    """
    chunks = -(-size // CHUNK)
    splits = -(-chunks // HELD_WARPS)
    if not sums:
        return Fp8CudaPlan(1, chunks, 1) if splits == 1 else None
    while tiles * splits < multiprocessors and -(-chunks // splits) > 2:
        splits += 1
    return Fp8CudaPlan(splits, -(-chunks // splits), 1)


@functools.cache
def plan_fp8_cuda(tokens: int, size: int, sums: bool) -> Fp8CudaPlan:
    """For x [tokens, size], in shared memory. sums: splits are wanted."""
    splits = -(-2 * tokens * size // _MOST_X) if sums else 1
    return Fp8CudaPlan(min(splits, -(-size // CHUNK)))


def shared_bytes(plan: Fp8CudaPlan, tokens: int, split_chunks: int) -> int:
    """Of a block: x, the ring of every warp, and two buffers of the warps' sums. With x in registers: the rings, the
    buffers of sums, and two barriers for each buffer.
    """
    if plan.turns:
        return plan.warps * (HELD_STAGES * TILE_ROWS * CHUNK + BUFFERS * WARP_SUMS) + 2 * BUFFERS * 8
    x = -(-tokens * (split_chunks * CHUNK * 2 + 16) // 128) * 128
    return x + plan.warps * STAGES * TILE_ROWS * CHUNK + 2 * plan.warps * tokens * _SUMS_PITCH * 4


def blocks_of_a_multiprocessor(plan: Fp8CudaPlan, bytes_of_a_block: int) -> int:
    """As many as have room, with x in shared memory at most two. Each takes tiles of 16 rows in turns."""
    room = (SHARED_BYTES + 1024) // (bytes_of_a_block + 1024)
    return max(1, min(room, HELD_WARPS // plan.warps if plan.turns else 2))
