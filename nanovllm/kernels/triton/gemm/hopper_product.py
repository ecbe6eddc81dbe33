"""Products of few tokens on Hopper: how they are cut, and their launch. The kernel is in `hopper_product_kernel.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import are_constant
from nanovllm.kernels.triton.gemm.small_product_plan import MANY_OUTPUTS
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, num_sms

# Rows of the weight that a program has, and columns of a tile: a swizzled line of 128 bytes.
ROWS = 64
_TILE = 64
# Numbers of tokens that are two tiles: how many are in the first.
_FIRST = {96: 64, 160: 128, 192: 128, 256: 128}
_BLOCK = 128
# Above this many tokens the library is the faster one. For large weights, which blocks of tokens would read again, it
# is so earlier.
MAX_TOKENS = 256
_MOST_OF_LARGE = 192
_LARGE_WEIGHT = 8 << 20
# Shared memory for tiles: of a program that has a multiprocessor to itself or shares it with one of the next kernel,
# of two and of three.
_ROOM = 200 << 10
_HALF = 108 << 10
_THIRD = 74 << 10


@dataclass(frozen=True)
class HopperProductPlan:
    """How a product is cut into programs."""

    splits: int
    """Programs that share the columns of the same rows."""
    chunks: int
    """Tiles of 64 columns that a program asks for, and multiplies, at a time: a group."""
    slots: int
    """Groups in shared memory at a time."""
    rounds: int
    """How often a slot is filled."""
    block: int = _BLOCK
    """Tokens that a program has at most: 128 or 256."""


@functools.cache
def plan_hopper_product(
    num_tokens: int, num_rows: int, size: int, may_split: bool, multiprocessors: int
) -> HopperProductPlan:
    """For x [num_tokens, size] and a weight of `num_rows` rows. Measured on an H200 in whole layers of Qwen3-0.6B and
    8B.

    Args:
        may_split: whether float32 sums of parts of the columns are wanted.
    """
    tiles, columns = cdiv(num_rows, ROWS), cdiv(size, _TILE)
    splits = 1
    if may_split:
        # Enough programs to ask for all the weights at once; more only leave more sums to add, of more tokens.
        waves = 3 if num_tokens <= 16 else 2 if num_tokens <= 32 else 1
        wanted = cdiv(columns, 12) if columns < 64 else columns // 32
        splits = max(1, min(wanted, waves * multiprocessors // tiles))
    columns = cdiv(columns, splits)
    # Two tiles of tokens: of a large weight, which is then read once, and of sums that are split, where two blocks
    # would be half empty.
    wide = num_tokens > 64 if num_rows * size >= _LARGE_WEIGHT else may_split and _BLOCK < num_tokens <= _MOST_OF_LARGE
    block = 2 * _BLOCK if wide else _BLOCK
    group = (ROWS + tunables.hopper_product_tokens(num_tokens, block)) * _TILE * 2
    fit, half, third = _ROOM // group, _HALF // group, _THIRD // group
    programs = tiles * splits * cdiv(num_tokens, block)
    if 4 * cdiv(columns, 4) <= fit and programs <= multiprocessors:
        chunks, slots = 4, cdiv(columns, 4)  # all that a program has
    elif 2 * multiprocessors < programs <= 3 * multiprocessors and third >= 3:
        # Three a multiprocessor: all at once, where a second round would leave much of the GPU idle.
        chunks, slots = (2, third // 2) if third >= 6 else (1, third)
    elif (
        num_tokens > _BLOCK == block
        and multiprocessors < programs <= 2 * multiprocessors
        and not may_split
        and half >= 2
    ):
        chunks, slots = 1, half  # two a multiprocessor: all at once
    elif fit >= 16 and (programs <= multiprocessors or (num_tokens > 16 and 2 < programs / multiprocessors <= 8)):
        chunks, slots = 4, 4
    else:  # what lets programs of the next kernel in, and suffices to keep reading
        chunks, slots = (2, 4) if fit >= 16 or (num_tokens > 64 and fit >= 8) else (1, min(8, fit))
    slots = min(slots, cdiv(columns, chunks))
    rounds = cdiv(columns, chunks * slots)
    return HopperProductPlan(cdiv(cdiv(size, _TILE), chunks * slots * rounds), chunks, slots, rounds, block)


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


def worth(num_rows: int, size: int, gated: bool, dtype: torch.dtype) -> range:
    """The numbers of tokens that products with a weight of this shape are worth it for, on a GPU that has them.

    Measured on an H200 with the decoder layers and the LM head of Qwen3. A layer's weights share the hidden size, the
    lesser of their two, so that they are all taken for one token, or none is.
    """
    if dtype not in (torch.bfloat16, torch.float16) or size <= 0 or size % _TILE:
        return range(0)
    if num_rows <= 0 or (gated and num_rows % 16):
        return range(0)
    if num_rows > (2 if gated else 1) * MANY_OUTPUTS:
        return range(0) if gated else range(2, 33)
    least = 2 if 1024 < min(num_rows, size) < 4096 else 1
    return range(least, 1 + (MAX_TOKENS if num_rows * size < _LARGE_WEIGHT else _BLOCK if gated else _MOST_OF_LARGE))


def num_tokens_taken(weight: torch.Tensor, gated: bool = False) -> range:
    """The numbers of tokens that products with this weight [rows, size] are taken for."""
    if not (
        weight.is_cuda and _is_hopper(weight.device.index) and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    ):
        return range(0)
    rows, size = weight.shape
    return worth(rows, size, gated, weight.dtype)


# Rows of a weight whose products are few programs, if they have all of its columns: a quarter of the GPU's.
_FEW_ROWS = 32 * ROWS
# Bytes that one of these may read.
_MOST_READ = 640 << 10


def most_tokens_whole(num_rows: int, size: int, itemsize: int = 2) -> int:
    """Up to how many tokens a product is worth it whose columns are not split, as in `linear`; `worth` is about any.

    On an H200 each of few programs reads, of the weight and of all tokens, about 100 bytes a ns: 8 x 1024 x 2048
    takes 3.7 us, 8 x 1024 x 3072 5.1 and 64 x 1024 x 3072 8.9; the library takes 5.9, 7.5 and 7.9. The limit between
    8 and 64 is an estimate. 160 x 4096 x 1024 takes 7.4 and the library 5.8, 256 x 4096 x 1024 6.5 and 6.7; but
    behind the library's product attention starts only when that has ended. 160 x 6144 x 4096 takes 24 and the library
    20.
    """
    if num_rows > _FEW_ROWS:
        return MAX_TOKENS if num_rows * size < _LARGE_WEIGHT else _BLOCK
    tokens = 8
    while (
        tokens < MAX_TOKENS
        and (ROWS + tunables.hopper_product_tokens(2 * tokens, _BLOCK)) * size * itemsize <= _MOST_READ
    ):
        tokens *= 2
    return tokens


def num_tokens_whole(weight: torch.Tensor) -> range:
    """As `num_tokens_taken`, for products whose columns are not split."""
    taken = num_tokens_taken(weight)
    return range(taken.start, min(taken.stop, 1 + most_tokens_whole(*weight.shape))) if taken else taken


def takes(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, whole: bool = False) -> bool:
    """Whether `product` can and should be used for x [num_tokens, size]; whole: with columns that are not split, not
    gated."""
    aligned = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if not aligned or x.dtype != weight.dtype:
        return False
    return x.shape[0] in (num_tokens_whole(weight) if whole else num_tokens_taken(weight, gated))


@functools.cache
def _hopper() -> tuple[Any, Any]:
    """(the kernel, `descriptor`), imported where they can run: Gluon is not in every Triton."""
    from nanovllm.kernels.triton.gemm.hopper_product_kernel import hopper_product_kernel
    from nanovllm.kernels.triton.gluon_compat import descriptor

    return hopper_product_kernel, descriptor


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, split: bool = False,
    plan: HopperProductPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + b, or if gated silu(x G^T) * (x U^T), for what `takes` says.

    Args:
        x: [num_tokens, size], bfloat16 or float16; weight: [rows, size], if gated the rows of the gate, then those of
            the up projection.
        split: leave float32 sums [splits, num_tokens, rows] of parts of the columns, without bias.
        plan: instead of the tuned one, or where there is none of the one that `plan_hopper_product` picks.
    """
    num_tokens, size = x.shape
    bias = adjacent(bias)
    rows = weight.shape[0]
    outputs = rows // 2 if gated else rows
    if plan is None:
        key = tunables.hopper_product_key(num_tokens, outputs, size, x.dtype, gated, split)
        plan = tunables.HOPPER_PRODUCT.find(x.device, *key) or plan_hopper_product(
            num_tokens, rows, size, split, num_sms(x)
        )
    if split:
        y = torch.empty((plan.splits, num_tokens, outputs), dtype=torch.float32, device=x.device)
    else:
        y = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    tokens, columns = tunables.hopper_product_tokens(num_tokens, plan.block), size // _TILE
    first = _FIRST.get(tokens, tokens)
    kernel, descriptor = _hopper()
    # Columns in tiles of 64, the outermost dimension: so one request brings a group of tiles, one after the other.
    if gated:
        shape: tuple[int, ...] = (columns, outputs // 8, 2, 8, _TILE)
        strides: tuple[int, ...] = (_TILE, 8 * size, outputs * size, size, 1)
        box: tuple[int, ...] = (plan.chunks, ROWS // 16, 2, 8, _TILE)
    else:
        shape, strides, box = (columns, rows, _TILE), (_TILE, size, 1), (plan.chunks, ROWS, _TILE)

    def of_x(tile: int) -> Any:
        view = (columns, num_tokens, _TILE), (_TILE, x.stride(0), 1)
        return descriptor(x.data_ptr(), x.dtype, *view, (plan.chunks, tile, _TILE))

    kernel[cdiv(rows, ROWS), plan.splits, cdiv(num_tokens, tokens)](
        descriptor(weight.data_ptr(), weight.dtype, shape, strides, box),
        of_x(first),
        of_x(tokens - first or first),
        x if bias is None else bias,
        y,
        num_tokens,
        OUTPUTS=outputs,
        TOKENS=first,
        MORE=tokens - first,
        CHUNKS=plan.chunks,
        SLOTS=plan.slots,
        ROUNDS=plan.rounds,
        SPLITS=plan.splits,
        GATED=gated,
        BIAS=bias is not None,
        num_warps=4,
        launch_pdl=are_constant(weight, bias),
    )  # fmt: skip
    return y
