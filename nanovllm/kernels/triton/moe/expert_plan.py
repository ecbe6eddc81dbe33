"""How the products of experts are cut into programs. A plan depends on shapes alone, so a CUDA graph can hold any call.

`PairPlan` has the rows that were among the fastest for Qwen3-30B-A3B on an H200 (docs/log/kernels.md). The tiles of
`ExpertPlan` are those of `product_plan` for a product of as many tokens as an expert has; no others were tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2

_WARPS, _LANES = 4, 32
_REGISTERS = 48
"""Registers of a thread for weights that are on their way: with more, a multiprocessor has room for fewer programs."""
FEW_PAIRS = 8
"""With this many experts for each pair, or more, hardly any expert is read twice."""


@dataclass(frozen=True)
class PairPlan:
    """For `pair_gate_up_kernel` and `pair_down_kernel`, in which a program has one token and 4 warps.

    rows: of the gate and as many of the up projection. block: columns of a tile. down_rows, down_block: of the others.
    """

    rows: int
    block: int
    down_rows: int
    down_block: int


@dataclass(frozen=True)
class ExpertPlan:
    """For `block_kernel`: pairs of a block, rows of the weight and columns of a tile."""

    tokens: int
    rows: int
    block_k: int
    warps: int
    stages: int


@cache
def plan_pairs(
    num_tokens: int, top_k: int, num_experts: int, intermediate: int, hidden: int, itemsize: int
) -> PairPlan | None:
    """The plan for so few tokens that each pair reads its expert; None: experts are to be read once for all pairs."""
    if num_tokens > 1 and num_tokens * top_k * FEW_PAIRS > num_experts:
        return None
    lane = 16 // itemsize
    elements = _WARPS * _LANES * _REGISTERS * 4 // itemsize  # of all the tiles of a program
    # The warps of the first kernel share a row, those of the second have rows and experts of their own.
    block = min(_WARPS * _LANES * lane, 1024, max(lane, next_power_of_2(hidden)))
    down_block = min(_LANES * lane, max(lane, next_power_of_2(intermediate)))
    rows = elements // (2 * cdiv(hidden, block) * block)
    down_rows = elements // (next_power_of_2(top_k) * cdiv(intermediate, down_block) * down_block)
    if not rows or not down_rows:
        return None
    most = 8 if itemsize > 1 else 4  # more 8-bit weights in a tile would not fit the registers as float32
    return PairPlan(_power(rows, most), block, _power(down_rows, most), down_block)


def _power(n: int, most: int) -> int:
    return min(most, 1 << (n.bit_length() - 1))


@cache
def plan_blocks(num_pairs: int, num_experts: int, itemsize: int) -> ExpertPlan:
    """The plan for pairs that are spread over the experts, a half more in a block than an expert has on average."""
    if itemsize == 4:  # on the ordinary units, with tiles in registers
        return ExpertPlan(16, 32, 32, 4, 3)
    tokens = min(128, max(16, next_power_of_2(cdiv(3 * num_pairs, 2 * num_experts))))
    if tokens <= 32:
        return ExpertPlan(tokens, 64, 128, 4, 4)
    if tokens == 64:
        return ExpertPlan(64, 128, 64, 4, 4)
    return ExpertPlan(128, 128, 64, 8, 3)


@cache
def plan_fp8_blocks(num_pairs: int, num_experts: int) -> ExpertPlan:
    """As `plan_blocks`, for weights that are decoded in registers: tiles of 128 columns."""
    tokens = min(64, max(16, next_power_of_2(cdiv(3 * num_pairs, 2 * num_experts))))
    return ExpertPlan(tokens, 64, 128, 4, 4 if tokens < 64 else 3)
