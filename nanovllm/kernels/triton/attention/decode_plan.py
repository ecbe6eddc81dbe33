"""Plans of decode attention for any GPU: how a batch is cut, tile sizes, warps. With and without shared prefixes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.kernels.triton.launch_arguments import next_power_of_2

# Partial results of the shared part take at most about this, since a graph's memory has to have room for them.
_PARTIAL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class DecodePlan:
    """What is fixed when a launch is captured: it follows from shapes and the bound on the lengths alone."""

    pieces: int
    """The batch is cut into pieces of 1 / `pieces` of its tokens, or shorter where a sequence is."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int
    merge_registers: int
    """Registers a thread for the partial results that are merged at a time: few steps for many."""
    early: bool
    """Whether a piece's last tile is in registers before the queries are: `qk_norm_rope_attention` only."""
    least: int = 1
    """Tiles that no sequence is cut below."""

    def chunk(self, elements: int) -> int:
        """Partial results of `elements` each that are merged at a time."""
        return max(1, min(32, 32 * self.warps * self.merge_registers // elements))


_ROWS = 32
"""Rows of a tile with the queries of several tokens. With 64, a large batch's tiles take more shared memory than
GPUs other than a datacentre's have, 99 KiB a program."""


def tokens_together(queries: int, group: int) -> int:
    """How many of a sequence's query tokens have their rows in one tile."""
    return max(1, min(queries, _ROWS // group))


class DecodeSizes(NamedTuple):
    """What a plan follows from.

    Attributes:
        num_kv_heads, group: of few query tokens a sequence, KV heads times tiles of them, and the rows of a tile.
        cache_itemsize: bytes an element of the cache; tiles of float8 have twice the tokens of 16-bit ones where that
            pays.
        full_precision: whether products are float32, which no tensor core computes.
    """

    num_seqs: int
    num_kv_heads: int
    group: int
    head_dim: int
    cache_itemsize: int
    full_precision: bool
    multiprocessors: int


@functools.cache
def plan_decode(sizes: DecodeSizes, rotate: bool) -> DecodePlan:
    """Measured on an H200 with bf16, fp8 and head_dim 128; other sizes get tiles of as many bytes.

    Args:
        rotate: for `qk_norm_rope_attention`.
    """
    num_seqs, num_kv_heads, group, head_dim, cache_itemsize, full_precision, multiprocessors = sizes
    pairs = num_seqs * num_kv_heads
    dim_pad = next_power_of_2(head_dim)
    bytes_per_token = 4 * dim_pad  # of a 16-bit cache
    small_tile = max(16, min(32, 16384 // bytes_per_token))
    large_tile = max(16, min(64, 32768 // bytes_per_token))
    warps = 2 if group <= 16 else 4 if group <= 32 else 8

    def pieces(programs_per_multiprocessor: float) -> int:
        return max(1, int(programs_per_multiprocessor * multiprocessors) // num_kv_heads)

    if full_precision:  # small tiles and many threads, or registers spill
        warps = 4 if group <= 16 and dim_pad <= 128 and cache_itemsize != 2 else 8
        return DecodePlan(pieces(2), 16, warps, stages=3 if dim_pad <= 128 else 2, merge_registers=16, early=False)
    if pairs >= 6 * multiprocessors:
        # Enough sequences to fill several waves: large tiles, since few streams at a time suit DRAM, and cut only what
        # is far longer than the average.
        warps *= min(cache_itemsize, 2)
        return DecodePlan(pieces(3), large_tile, warps, stages=3, merge_registers=32, early=False)
    if pairs >= 4 * multiprocessors:
        # About one wave: all programs resident at once.
        tile = large_tile if cache_itemsize == 1 else small_tile
        return DecodePlan(pieces(3), tile, warps, stages=4, merge_registers=32, early=False)
    # Latency counts: every sequence is cut, into single tiles if it is short.
    if dim_pad > 128:
        return DecodePlan(pieces(2), small_tile, warps, stages=3, merge_registers=32, early=False)
    if num_seqs <= 2 or group > 16:
        return DecodePlan(pieces(num_seqs), small_tile, warps, stages=3, merge_registers=64, early=rotate)
    if pairs >= 3 * multiprocessors:
        return DecodePlan(pieces(3), small_tile, warps, stages=3, merge_registers=64, early=False, least=2)
    if num_seqs > 8:
        return DecodePlan(
            pieces(4 if num_seqs <= 16 else 3), large_tile, 2, stages=2, merge_registers=64, early=rotate, least=2
        )
    # Programs of one warp, which waits for no other. Registers let eight run beside each other; where lengths do not
    # divide evenly there are a few pieces more than asked for. A merge of more pieces than three tiles give takes
    # longer than it saves.
    tile = max(16, 8192 // bytes_per_token)
    if num_seqs <= 4:
        return DecodePlan(pieces(4), tile, 1, stages=2, merge_registers=64, early=rotate, least=2)
    return DecodePlan(pieces(7.5), tile, 1, stages=3, merge_registers=64, early=rotate, least=3)


@dataclass(frozen=True)
class SharedPlan:
    """What is fixed when a launch is captured: it follows from shapes alone."""

    rows: int
    """Query rows a tile: sequences x query heads of a KV head."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int
    programs: int
    """For each KV head; no more than run at a time, since none of them is short."""
    pieces: int
    """That a row tile is cut into at most, at least 2; bounds the memory for partial results."""


@functools.cache
def plan_shared(sizes: DecodeSizes, warpgroups: bool) -> SharedPlan:
    """Predicted, then timed as it is (docs/attention.md): with 16-bit and float8 caches at head_dim 128, little else
    was tried. Not timed for other head sizes, float32 and GPUs before Hopper.

    Args:
        warpgroups: whether four warps multiply together (sm_90 and later), which keeps registers free for large tiles.
    """
    num_seqs, num_kv_heads, group, head_dim, cache_itemsize, full_precision, multiprocessors = sizes
    dim_pad = next_power_of_2(head_dim)
    most = next_power_of_2(max(16, num_seqs * group))
    if full_precision:  # products on CUDA cores: small tiles and many threads, or registers spill
        rows, tile, warps, stages, together = min(most, 16 if cache_itemsize == 2 else 32), 16, 8, 2, 1
    elif cache_itemsize == 1 or head_dim != dim_pad:
        # Converted tiles, or queries that are rotated in twice the registers.
        rows, warps, together = min(most, 32), 4, 2
        tile, stages = max(16, min(64, 8192 // dim_pad)), 3
    elif warpgroups and most >= 128 and dim_pad <= 128:
        # Two warpgroups of 64 rows: 128 flops for each byte of K and V that comes from L2.
        rows, tile, warps, stages, together = 128, 64, 8, 3, 1
    else:
        rows, warps, together = min(most, 64 if dim_pad <= 128 else 32), 4, 2
        tile, stages = 64 if dim_pad <= 64 else 32, 3 if dim_pad <= 128 else 2
    programs = max(1, together * multiprocessors // num_kv_heads)
    cap = _PARTIAL_BYTES // (4 * num_seqs * num_kv_heads * group * head_dim)
    return SharedPlan(rows, tile, warps, stages, programs, max(2, min(programs + 1, max(4, cap))))


@functools.cache
def plan_rest(sizes: DecodeSizes) -> DecodePlan:
    """For the tokens behind the shared ones."""
    num_seqs, head_dim = sizes.num_seqs, sizes.head_dim
    # Measured with programs of one warp for less than a wave, as up to eight sequences have them.
    alike = min(num_seqs, 8) if num_seqs * sizes.num_kv_heads < 4 * sizes.multiprocessors else num_seqs
    plan = plan_decode(sizes._replace(num_seqs=alike), False)
    if sizes.full_precision or sizes.cache_itemsize == 1:
        return plan
    # What a sequence has for itself is a few tiles, so that a program mostly starts and ends: half the tile lets twice
    # the programs run beside each other.
    tile = max(16, min(plan.tile, 16384 // (4 * next_power_of_2(head_dim))))
    # Rows of 256 elements want the registers of all warps.
    return replace(plan, tile=tile, warps=plan.warps // 2 if tile < plan.tile and head_dim <= 128 else plan.warps)
