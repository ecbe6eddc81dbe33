"""How the product of a small batch is cut into programs, and for how many tokens. Both depend on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2

MAX_TOKENS = 8
"""With more tokens the separate ops are faster: here every program reads the whole input again."""
MANY_OUTPUTS = 32768
"""A language-model head has more. From 2 tokens on the library reads it faster."""
SHARED_BYTES = 96 * 1024
"""For the weights and inputs of a program. Every GPU with bf16 tensor cores has as much shared memory."""


@dataclass(frozen=True)
class VectorPlan:
    """For `vector_kernel`: rows of the weight a program (half gate, half up, if gated), and columns of a tile."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class MatrixPlan:
    """For `matrix_kernel`: rows as in `VectorPlan`; `split` warps, each with `depth` columns of a tile.

    late: the norm of a token multiplies its sums, not its inputs.
    """

    rows: int
    split: int
    depth: int
    late: bool = False


@functools.cache
def plan_small_product(
    num_tokens: int, num_outputs: int, size: int, gated: bool, dtype: torch.dtype
) -> VectorPlan | MatrixPlan | None:
    """The plan for x [num_tokens, size] and `num_outputs` rows (of the gate, if gated).

    None: not worth it, or no room. Measured on an H200 with bf16 and the shapes of Qwen3-0.6B and 8B.
    """
    if not num_tokens or not num_outputs or not size or dtype.itemsize > 4:
        return None
    if num_tokens == 1 or (dtype.itemsize == 4 and num_tokens <= 4):
        return _vector_plan(num_tokens, size, gated, dtype.itemsize)
    if num_tokens > MAX_TOKENS or dtype.itemsize != 2 or num_outputs > MANY_OUTPUTS:
        return None
    return _matrix_plan(num_tokens, num_outputs, size, gated, dtype)


def _vector_plan(num_tokens: int, size: int, gated: bool, itemsize: int) -> VectorPlan | None:
    lane = 16 // itemsize
    warps = min(8 if size > 8192 else 4 if size > 3072 or gated else 2, cdiv(next_power_of_2(size), 32 * lane))
    block = 32 * lane * warps
    tiles = cdiv(size, block)
    if tiles > (12 if num_tokens == 1 else 8):
        return None  # the registers of a thread would not hold its part of a row and of the input
    # About 64 registers of weights a thread: enough to read ahead, and programs of several kernels are resident.
    rows = 1 << max(1 if gated else 0, (24 // tiles).bit_length() - 1)
    return VectorPlan(rows, block, warps)


def _matrix_plan(num_tokens: int, num_outputs: int, size: int, gated: bool, dtype: torch.dtype) -> MatrixPlan | None:
    if size <= 1024:
        if num_tokens in (3, 4) and num_outputs > 1024 and dtype == torch.bfloat16 and size > 512:
            return MatrixPlan(32, 4, next_power_of_2(size) // 4, late=True)  # float16 could overflow before the norm
        # From 5 tokens on the norm takes as long as the product: a program takes many rows, which share an input. Few
        # warps, since they exchange sums at the end.
        warps = 4 if num_tokens > 4 else 8
        rows = 16 if num_outputs <= 1024 or (gated and num_tokens <= 4) else 32
        return MatrixPlan(rows, warps, max(16, next_power_of_2(size) // warps))  # tensor cores take 16 columns at least
    cut = MatrixPlan(16 if gated else 8, 8, 128)
    columns = cdiv(size, cut.split * cut.depth) * cut.split * cut.depth
    return cut if 2 * (cut.rows + MAX_TOKENS) * columns <= SHARED_BYTES else None


@functools.cache
def max_tokens(num_outputs: int, size: int, gated: bool, dtype: torch.dtype) -> int:
    """Up to how many tokens the kernels here are used; 0: never."""
    n = 0
    while plan_small_product(n + 1, num_outputs, size, gated, dtype) is not None:
        n += 1
    return n
