"""How the product with a packed weight is cut into programs, and for how many tokens. Both depend on shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2

MAX_TOKENS = 256
"""With more the weight is dequantised once, and the library multiplies: an estimate, which no GPU has confirmed."""
MANY_TOKENS = 16
"""With more a program has four warps or more."""
MOST_TOKENS, MOST_TOKENS_BEFORE_HOPPER = 128, 32
"""Of a program. Before Hopper the tokens pass through registers."""
LEAST_BLOCKS = 4
"""Tiles of columns that a program has at least, where programs share columns."""


@dataclass(frozen=True)
class PackedPlan:
    """How a product is cut into programs."""

    rows: int
    """Of the weight, a program."""
    warps: int
    stages: int
    """Tiles of columns that are read ahead, and the one that is multiplied."""
    splits: int
    """Programs that share the columns of the same rows."""


def has_shared_operands(major: int) -> bool:
    """Whether tensor cores of this compute capability take tokens from shared memory: those of data-center GPUs from
    Hopper on, which have room for many there.
    """
    return major in (9, 10)


def tokens_of_a_program(num_tokens: int, shared: bool) -> int:
    """The tokens for which a program is compiled: a power of two, at least 8. shared: as `has_shared_operands`."""
    return min(MOST_TOKENS if shared else MOST_TOKENS_BEFORE_HOPPER, max(8, next_power_of_2(num_tokens)))


def columns_of_a_tile(tokens: int, bits: int, parts: bool) -> int:
    """Of a program of `tokens` tokens: 128, or of parts of 4-bit weights and few tokens 256, 128 bytes of a row."""
    return 256 if parts and bits == 4 and tokens <= MANY_TOKENS else 128


@functools.cache
def plan_packed_product(
    num_tokens: int, num_rows: int, size: int, bits: int, parts: bool, multiprocessors: int, shared: bool
) -> PackedPlan:
    """For x [num_tokens, size] and a weight of `num_rows` rows.

    Up to 16 tokens warps multiply with the instruction that takes both operands from registers. Beyond, groups of four
    warps have the one of Hopper, which is twice as fast and takes the tokens from shared memory. The constants are
    those of the fastest plans for the shapes of Qwen3-8B on an H200 (docs/log/kernels.md).

    Args:
        parts: for `part_kernel`, which needs registers for scales.
        shared: as `has_shared_operands`.
    """
    tokens = tokens_of_a_program(num_tokens, shared)
    blocks = cdiv(size, columns_of_a_tile(tokens, bits, parts))
    rows, warps, stages, programs = _shape_of_programs(tokens, num_rows, bits, parts, multiprocessors)
    wanted = programs * multiprocessors // (cdiv(num_rows, rows) * cdiv(num_tokens, tokens))
    if tokens <= MANY_TOKENS:
        wanted = 1 << max(0, wanted.bit_length() - 1)  # of the columns of models, each program then has as many
    return PackedPlan(rows, warps, stages, max(1, min(wanted, blocks // LEAST_BLOCKS)))


def _shape_of_programs(
    tokens: int, num_rows: int, bits: int, parts: bool, multiprocessors: int
) -> tuple[int, int, int, int]:
    """(rows, warps, stages, programs a multiprocessor that are wanted)"""
    if tokens <= MANY_TOKENS:
        if not parts:
            return 64, 4, 4, 3
        return (32, 2, 4, 6) if bits == 4 else (64, 4, 3, 6)
    if tokens >= MOST_TOKENS:
        return 128, 8, 3, 1
    if tokens > 32 or parts:
        return 64, 4, 3, 3
    if bits == 8:
        return 128, 4, 3, 2
    return (64, 4, 4, 2) if cdiv(num_rows, 64) >= 2 * multiprocessors else (128, 8, 4, 2)
