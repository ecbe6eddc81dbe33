"""How `products` cuts a product into programs.

A plan is a function of the shape alone. So results have the same bits every time, and a CUDA graph may record any call.
The constants are microseconds measured on an H200 (bfloat16, PyTorch 2.11, Triton 3.6), to rank the plans of one shape.
Results are right with any plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2

_READ = 4.3e6
"""Bytes a microsecond that a whole GPU reads."""
_SPLIT = 1.0
"""The kernel that adds up splits, without its reading and writing."""
_STREAM_BLOCK = 0.37
"""One program reads and multiplies 64 rows by 128 columns of a weight."""
_TILES = {(128, 256): 0.67, (128, 128): 0.345, (128, 64): 0.22, (64, 128): 0.24, (64, 64): 0.14}
"""One program multiplies 64 columns into a tile of [rows of x, rows of the weight]."""
_TILE_START = 1.5


@dataclass(frozen=True)
class StreamPlan:
    """For few tokens: see `stream_kernel`."""

    tokens: int
    """Tokens of a tile: 1, or a power of two of at least 16."""
    rows: int
    """Rows of the weight of a program; gate and up projection together."""
    block_k: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TilePlan:
    """For many tokens: see `tiled_kernel`."""

    block_m: int
    block_n: int
    """Outputs: a gated tile has as many rows of the gate and of the up projection."""
    block_k: int
    group_m: int
    splits: int
    warps: int
    stages: int
    tma: bool = False
    flatten: bool = False


@cache
def plan_product(
    m: int, n: int, k: int, itemsize: int, gated: bool, row_major: bool, tma: bool, sms: int
) -> StreamPlan | TilePlan:
    """The plan of [m, k] x [n (gated: 2 n), k]^T on `sms` multiprocessors.

    row_major: the rows of the weight are contiguous. tma: the Tensor Memory Accelerator may be used.
    """
    sums = n * (2 if gated else 1)
    if m == 1 and row_major:
        return _vector_plan(sums, k, itemsize, sms)
    if itemsize == 4:  # on the ordinary units, with tiles in registers
        if m <= 16:
            return StreamPlan(16, 32, 32, _splits(cdiv(sums, 32), cdiv(k, 128), 16 * sums, sms), 4, 3)
        return TilePlan(64, 64 if row_major and not gated else 32, 16, 8, 1, 4, 2)
    if m <= 64:
        return _stream_plan(m, sums, k, sms)
    if tma:
        return _tma_plan(m, n, sums, k, gated, sms)
    if cdiv(m, 128) * cdiv(sums, 128) >= sms:
        return TilePlan(128, 64 if gated else 128, 32, 8, 1, 8, 4)
    # Rows that wide loads do not fit go through registers, which bound the tile.
    return TilePlan(64, 32 if gated else 64, 64 if k % 8 == 0 else 32, 8, 1, 4, 3)


def _vector_plan(sums: int, k: int, itemsize: int, sms: int) -> StreamPlan:
    rows = 4 if sums >= 4 * sms else 2
    if 1024 < k and k % 2048 == 0:
        block, warps = 2048, 8
    elif 1024 < k <= 4096:
        block, warps = next_power_of_2(k), 8
    else:
        block, warps = min(1024, max(64, next_power_of_2(k))), 4
    block //= itemsize // 2  # as many bytes a thread whatever the dtype
    return StreamPlan(1, rows, block, 1, warps, 3 if warps == 4 and k > block else 1)


def _stream_plan(m: int, sums: int, k: int, sms: int) -> StreamPlan:
    tokens = max(16, next_power_of_2(m))
    programs = cdiv(sums, 64)
    splits = _splits(programs, cdiv(k, 128), m * sums, sms)
    if k % 8:  # rows that copies to shared memory do not fit go through registers, which bound the tile
        return StreamPlan(tokens, 64, 32 if tokens == 64 else 64, splits, 4, 3)
    # More than two programs a multiprocessor take less memory each: three are resident.
    crowded = programs * splits > 2 * sms
    if tokens == 64:
        return StreamPlan(tokens, 64, 64, splits, 4, 4 if crowded else 6)
    return StreamPlan(tokens, 64, 64 if crowded else 128, splits, 4, 6 if crowded else 4)


def _splits(programs: int, blocks: int, outputs: int, sms: int) -> int:
    """Into how many parts of k to divide the `blocks` of 64 x 128 elements that each of `programs` has."""

    def cost(splits: int) -> float:
        read = programs * blocks * 64 * 128 * 2 / _READ
        compute = cdiv(programs * splits, 2 * sms) * cdiv(blocks, splits) * _STREAM_BLOCK
        return max(read, compute) + _add_splits(splits, outputs)

    return min((s for s in (1, 2, 4, 8, 16) if s <= max(1, blocks)), key=cost)


def _add_splits(splits: int, outputs: int) -> float:
    return _SPLIT + 2 * splits * outputs * 4 / _READ if splits > 1 else 0.0


def _tma_plan(m: int, n: int, sums: int, k: int, gated: bool, sms: int) -> TilePlan:
    read = 2 * (sums * k + m * k) / _READ
    best, least = (0, 0, 0), float("inf")
    for (block_m, width), step in _TILES.items():
        block_n = width // 2 if gated else width
        tiles = cdiv(m, block_m) * cdiv(n, block_n)
        for splits in (1, 2, 4):
            steps = cdiv(cdiv(k, 64), splits)
            compute = cdiv(tiles * splits, sms) * (steps * step + 0.5)
            cost = _TILE_START + max(read, compute) + _add_splits(splits, m * sums)
            if cost < least:
                best, least = (block_m, width, splits), cost
    block_m, width, splits = best
    group = 16 if cdiv(m, block_m) >= 64 else 8
    plan = TilePlan(block_m, width // 2 if gated else width, 64, group, splits, 4, 8, tma=True)
    if width == 256:
        # Several tiles a program: the loads of the next begin before the results of this one are stored.
        return replace(plan, warps=8, stages=4 if gated else 3, flatten=splits == 1)
    if (block_m, width) == (128, 128):
        return replace(plan, warps=8, stages=5)
    if (block_m, width) == (64, 64):
        return replace(plan, block_k=128, stages=6)
    return plan
