"""Plans of prefill attention: tile sizes, warps, and how the kernel for Hopper uses shared memory and registers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nanovllm.kernels.triton.launch_arguments import next_power_of_2


@dataclass(frozen=True)
class PrefillPlan:
    """For the kernel that runs anywhere."""

    rows: int
    """Query rows of a program: tokens times the query heads of one KV head."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperPrefillPlan:
    """For the kernel of Hopper GPUs."""

    pack: int
    """Query heads of one KV head that share a tile: a power of two that divides their number."""
    tile: int
    """KV tokens a step."""
    stages: int
    """Tiles of keys, and of values, in shared memory."""
    programs: int = 0
    """0: as many as there are multiprocessors."""


# Bytes of a program on Hopper, and more than that kernel needs beside queries, keys and values: barriers, and 2 KiB a
# consumer.
_SHARED_MEMORY, _SCRATCH = 227 << 10, 5 << 10


@functools.cache
def plan_prefill(
    group: int,
    head_dim: int,
    itemsize: int,
    max_query_len: int,
    cache_itemsize: int = 2,
    capability: int = 9,
    concurrent: bool = False,
) -> PrefillPlan:
    """capability: the first number of the GPU's. Before 9 both operands of a product are in registers, and larger tiles
    spill.

    concurrent: as for `attention_prefill`.
    """
    dim_pad = next_power_of_2(head_dim)
    if itemsize == 4:
        return PrefillPlan(rows=32, tile=16, warps=8, stages=2)
    if max_query_len * group <= 64:
        rows = max(16, next_power_of_2(max_query_len * group))
        return PrefillPlan(rows, tile=64, warps=4, stages=3 if dim_pad <= 128 else 2)
    if dim_pad > 128:  # or registers spill
        return PrefillPlan(rows=64, tile=32, warps=8 if cache_itemsize == 1 and capability < 9 else 4, stages=2)
    if capability < 9:
        return PrefillPlan(rows=128, tile=32, warps=8, stages=2)
    if concurrent:  # two find room on a multiprocessor
        return PrefillPlan(rows=64, tile=64, warps=4, stages=3)
    return PrefillPlan(rows=128, tile=128, warps=8, stages=2)


@functools.cache
def plan_hopper_prefill(group: int, head_dim: int, block_size: int) -> HopperPrefillPlan | None:
    """Measured on an H200 with bf16 and head_dim 128; None: a shape that the kernel does not take."""
    if head_dim > 256 or block_size < 8 or block_size & (block_size - 1):
        return None
    pack = min(group & -group, 64)  # the largest power of two that divides it
    if head_dim > 128:
        return HopperPrefillPlan(pack, tile=64, stages=2)
    return HopperPrefillPlan(pack, tile=128, stages=2 if head_dim > 64 else 4)


def fit_hopper(plan: HopperPrefillPlan, dim_pad: int) -> tuple[int, bool]:
    """(of how many work items queries fit into shared memory beside keys and values: 2, or else 1; whether there is
    room for what a wide store of the output needs)."""
    left = _SHARED_MEMORY - 2 * 2 * plan.stages * plan.tile * dim_pad
    queries = 2 if 2 * 2 * 128 * dim_pad + _SCRATCH <= left else 1
    return queries, 2 * queries * 128 * dim_pad + _SCRATCH <= left


def prefill_registers(dim_pad: int) -> tuple[int, int]:
    """Registers of a consumer's and of the producer's threads: 12 warps share 65536, 168 each, which move to where
    they are needed.
    """
    return (224, 56) if dim_pad <= 128 else (232, 40)
