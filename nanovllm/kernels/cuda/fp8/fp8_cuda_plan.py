"""How the product with a weight of 8-bit floats is cut into blocks of threads. It depends on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_TOKENS, OCTET, MAX_WARPS, CHUNK, STAGES, BUFFERS, WARP_SUMS = 16, 8, 16, 256, 2, 4, 512
"""As in interface.cuh."""
LEAST_COLUMNS = 1024
"""Of a weight for which the kernel is used. Shorter rows were not timed: some warps would have no chunk."""
TILE_ROWS = 16
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, with 1 KiB for each block that the driver takes."""


@dataclass(frozen=True)
class Fp8CudaPlan:
    """How a product is cut into blocks."""

    splits: int
    """Blocks that share the columns of the same rows. More than one leave sums, which another kernel adds."""
    warps: int
    """Of a block; they share the columns of its rows."""
    turns: int
    """Chunks of columns of a warp, whose x it holds in registers."""


def most_turns(tokens: int) -> int:
    """Of a warp: its registers have room for x of two chunks of 8 tokens, or of one of 16."""
    return 2 if tokens <= OCTET else 1


def most_columns(tokens: int) -> int:
    """Of a block."""
    return most_turns(tokens) * MAX_WARPS * CHUNK


@functools.cache
def plan_fp8_cuda(tokens: int, tiles: int, size: int, sums: bool, multiprocessors: int) -> Fp8CudaPlan:
    """For a weight of `tiles` times 16 rows.

    A warp has one chunk of columns, and a block as many warps as there are chunks. More chunks than a block can have
    warps are shared by blocks, if sums are wanted. Otherwise a warp has two, with up to 8 tokens, and blocks share what
    is more than that. Of weights with fewer tiles than multiprocessors, more blocks share the columns, down to two
    chunks each.

    In a chain of Qwen3-8B's products on an H200 this was the fastest of 12 ways with 1, 2, 4 and 8 tokens
    (docs/log/kernels.md).
    """
    chunks = -(-size // CHUNK)
    if not sums and MAX_WARPS * CHUNK < size <= most_columns(tokens):
        return Fp8CudaPlan(1, -(-chunks // 2), 2)
    splits = -(-chunks // MAX_WARPS)
    while sums and tiles * splits < multiprocessors and -(-chunks // splits) > 2:
        splits += 1
    return Fp8CudaPlan(splits, -(-chunks // splits), 1)


def shared_bytes(plan: Fp8CudaPlan, tokens: int) -> int:
    """Of a block: the rings, the buffers of sums, and two barriers for each buffer."""
    sums = -(-tokens // OCTET) * BUFFERS * WARP_SUMS
    return plan.warps * (STAGES * TILE_ROWS * CHUNK + sums) + 2 * BUFFERS * 8


def blocks_of_a_multiprocessor(plan: Fp8CudaPlan, tokens: int) -> int:
    """As many as have room. Each takes tiles of 16 rows in turns."""
    return max(1, min((SHARED_BYTES + 1024) // (shared_bytes(plan, tokens) + 1024), MAX_WARPS // plan.warps))
