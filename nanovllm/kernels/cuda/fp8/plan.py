"""How the product with a weight of 8-bit floats is cut into blocks of threads. It depends on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_TOKENS, CHUNK, STAGES = 8, 256, 2
"""As in interface.cuh."""
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


@functools.cache
def plan_fp8_cuda(tokens: int, size: int, sums: bool) -> Fp8CudaPlan:
    """For x [tokens, size]. sums: splits are wanted."""
    splits = -(-2 * tokens * size // _MOST_X) if sums else 1
    return Fp8CudaPlan(min(splits, -(-size // CHUNK)))


def shared_bytes(plan: Fp8CudaPlan, tokens: int, split_chunks: int) -> int:
    """Of a block: x, the ring of every warp, and two buffers of the warps' sums."""
    x = -(-tokens * (split_chunks * CHUNK * 2 + 16) // 128) * 128
    return x + plan.warps * STAGES * TILE_ROWS * CHUNK + 2 * plan.warps * tokens * _SUMS_PITCH * 4


def blocks_of_a_multiprocessor(bytes_of_a_block: int) -> int:
    """Two, where they have room. Each takes tiles of 16 rows in turns."""
    return 2 if 2 * (bytes_of_a_block + 1024) <= SHARED_BYTES + 1024 else 1
