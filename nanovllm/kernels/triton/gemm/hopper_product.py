"""Products of few tokens on Hopper: how they are cut into programs, and their launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import are_constant
from nanovllm.kernels.triton.gemm.small_product_plan import MANY_OUTPUTS
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, num_sms

ROWS = 64  # of the weight, a program
_TILE = 64  # columns: a swizzled line of 128 bytes
FIRST_TILE = {96: 64, 160: 128, 192: 128, 256: 128}
"""Numbers of tokens that are two tiles -> tokens of the first."""
_BLOCK = 128
MAX_TOKENS = 256  # with more the library is faster
_MOST_OF_LARGE = 192  # for large weights, which each block of tokens reads again
_LARGE_WEIGHT = 8 << 20
_ROWS_OF_A_ROUND = 3 * 132 * ROWS
"""Of more rows the programs do not fit on the GPU at once, three a multiprocessor. They run in rounds, one each.

On an H200 gate and up of Qwen3-8B, 384 programs, took 56.8, 64.4 and 65.5 us in such rounds at 64, 96 and 128 tokens.
The library with `silu_and_mul` took 55.1, 56.6 and 59.3.
"""
_TOKENS_OF_ROUNDS = 32
"""With 25,600 x 5,120 and 64 tokens a layer takes 7 us less by the library, with 32 tokens 3 us more."""
_UNEVEN_ROWS = range(132 * ROWS + 1, 198 * ROWS + 1)
"""At most half of the multiprocessors have two programs, the others one. With more tokens the library is faster.

On an H200 a layer with a gate and up of 12,288 x 4096, 192 programs, takes 5.3 and 5 us less by the library at 96 and
128 tokens, and with one of 12,288 x 2048 1.8 and 1.7; at 64 tokens 1.2 and 0.2, about what such timings differ by.
Other weights with this number of rows were not timed. They have the same limit.
"""
_TOKENS_OF_UNEVEN = 64
_ROUTER_ROWS = 4 * ROWS
"""Weights of up to as many rows, such as a router's, have four programs at most, which read for longer than others run.

On an H200 a weight of 128 x 2048 takes 4.7 us with 1 token and 8.7 with 64; the library takes 5.4 with 128.
"""
_ROOM, _HALF, _THIRD = 200 << 10, 108 << 10, 74 << 10
"""Shared memory for the tiles of a program that has 1, 1/2, 1/3 of a multiprocessor."""


@dataclass(frozen=True)
class HopperProductPlan:
    """How a product is cut into programs."""

    splits: int
    """Programs that share the columns of the same rows."""
    chunks: int
    """Tiles of 64 columns that a program loads and multiplies at a time: a group."""
    slots: int
    """Groups in shared memory."""
    rounds: int
    """How often a slot is filled."""
    block: int = _BLOCK
    """The most tokens of a program: 128 or 256."""


@functools.cache
def plan_hopper_product(
    num_tokens: int, num_rows: int, size: int, may_split: bool, multiprocessors: int
) -> HopperProductPlan:
    """For x [num_tokens, size] and a weight of `num_rows` rows. Measured on an H200 in layers of Qwen3-0.6B and 8B.

    may_split: the caller takes float32 sums of parts of the columns.
    """
    tiles, columns = cdiv(num_rows, ROWS), cdiv(size, _TILE)
    splits = 1
    if may_split:
        # Enough programs to load all the weights at once. More programs only leave more sums to add.
        waves = 3 if num_tokens <= 16 else 2 if num_tokens <= 32 else 1
        wanted = cdiv(columns, 12) if columns < 64 else columns // 32
        splits = max(1, min(wanted, waves * multiprocessors // tiles))
    columns = cdiv(columns, splits)
    # Two tiles of tokens: a large weight is then read once; and two blocks of split sums would be half empty.
    wide = num_tokens > 64 if num_rows * size >= _LARGE_WEIGHT else may_split and _BLOCK < num_tokens <= _MOST_OF_LARGE
    block = 2 * _BLOCK if wide else _BLOCK
    group = (ROWS + tunables.hopper_product_tokens(num_tokens, block)) * _TILE * 2
    fit, half, third = _ROOM // group, _HALF // group, _THIRD // group
    programs = tiles * splits * cdiv(num_tokens, block)
    if 4 * cdiv(columns, 4) <= fit and programs <= multiprocessors:
        chunks, slots = 4, cdiv(columns, 4)  # all that a program has
    elif 2 * multiprocessors < programs <= 3 * multiprocessors and third >= 3:
        # Three a multiprocessor, all at once: a second round would leave much of the GPU idle.
        chunks, slots = (2, third // 2) if third >= 6 else (1, third)
    elif num_tokens > _BLOCK == block and 1 < programs / multiprocessors <= 2 and not may_split and half >= 2:
        chunks, slots = 1, half  # two a multiprocessor, all at once
    elif fit >= 16 and (programs <= multiprocessors or (num_tokens > 16 and 2 < programs / multiprocessors <= 8)):
        chunks, slots = 4, 4
    else:  # enough to keep reading, and programs of the next kernel still find room
        chunks, slots = (2, 4) if fit >= 16 or (num_tokens > 64 and fit >= 8) else (1, min(8, fit))
    slots = min(slots, cdiv(columns, chunks))
    rounds = cdiv(columns, chunks * slots)
    return HopperProductPlan(cdiv(cdiv(size, _TILE), chunks * slots * rounds), chunks, slots, rounds, block)


@functools.cache
def is_hopper(index: int) -> bool:
    """Whether the GPU of this index has compute capability 9."""
    return torch.cuda.get_device_capability(index)[0] == 9


def worth(num_rows: int, size: int, gated: bool, dtype: torch.dtype) -> range:
    """The numbers of tokens for which `product` is the fastest on a Hopper GPU, with a weight of this shape.

    Measured on an H200 with the decoder layers and the LM head of Qwen3. The weights of a layer share the hidden size,
    the smaller of their two. So `product` takes all of them for one token, or none.
    """
    if dtype not in (torch.bfloat16, torch.float16) or size <= 0 or size % _TILE:
        return range(0)
    if num_rows <= _ROUTER_ROWS or (gated and num_rows % 16):
        return range(0)
    if num_rows > (2 if gated else 1) * MANY_OUTPUTS:
        return range(0) if gated else range(2, 33)
    least = 2 if 1024 < min(num_rows, size) < 4096 else 1
    if num_rows * size < _LARGE_WEIGHT:
        return range(least, 1 + MAX_TOKENS)
    if num_rows > _ROWS_OF_A_ROUND:
        return range(least, 1 + _TOKENS_OF_ROUNDS)
    if num_rows in _UNEVEN_ROWS:
        return range(least, 1 + _TOKENS_OF_UNEVEN)
    return range(least, 1 + (_BLOCK if gated else _MOST_OF_LARGE))


def num_tokens_taken(weight: torch.Tensor, gated: bool = False) -> range:
    """The numbers of tokens for which `product` takes this weight [rows, size]."""
    here = weight.is_cuda and is_hopper(weight.device.index)
    if not (here and weight.is_contiguous() and weight.data_ptr() % 16 == 0):
        return range(0)
    rows, size = weight.shape
    return worth(rows, size, gated, weight.dtype)


_FEW_ROWS, _SOME_ROWS = 32 * ROWS, 80 * ROWS
"""Of a weight: unsplit, its product has programs for a quarter, for three fifths of the GPU."""
_TOKENS_OF_FEW, _TOKENS_OF_SOME = 8, 32
"""For which that is the fastest whatever a program reads."""
_MOST_READ = 640 << 10  # bytes that such a program may read with more tokens


def most_tokens_whole(num_rows: int, size: int) -> int:
    """The most tokens for which `product` is faster than the library without splitting columns, as in `linear`.

    On an H200 each of few programs reads about 100 bytes a ns. 8 x 1024 x 2048 takes 3.7 us, 8 x 1024 x 3072 5.1 and
    64 x 1024 x 3072 8.9; the library takes 5.9, 7.5 and 7.9. The limit between 8 and 64 is an estimate. 160 x 4096 x
    1024 takes 7.4 (library: 5.8), and 256 tokens take 6.5 (6.7); but attention behind the library's product starts
    only at its end. 160 x 6144 x 4096 takes 24 (20).

    With 64 to 128 tokens a layer takes 0.1 to 7.6 us less if the library multiplies with one of 5120 x 5120, 5120 x
    4096, 5120 x 12,800, 3072 x 4096, 4096 x 2048 and 4096 x 6144; with 32 tokens between 0.2 us less and 1.6 more.
    4096 x 2048 stays here up to 64 tokens, where the library gains 0.8 us, by the bytes that a program reads.
    """
    large = num_rows * size >= _LARGE_WEIGHT
    if num_rows > (_SOME_ROWS if large else _FEW_ROWS):
        return _BLOCK if large else MAX_TOKENS
    tokens, most = (_TOKENS_OF_FEW, MAX_TOKENS) if num_rows <= _FEW_ROWS else (_TOKENS_OF_SOME, _BLOCK)
    while tokens < most and 2 * size * (ROWS + tunables.hopper_product_tokens(2 * tokens, _BLOCK)) <= _MOST_READ:
        tokens *= 2
    return tokens


def num_tokens_whole(weight: torch.Tensor) -> range:
    """As `num_tokens_taken`, without splitting columns."""
    taken = num_tokens_taken(weight)
    return range(taken.start, min(taken.stop, 1 + most_tokens_whole(*weight.shape))) if taken else taken


def takes(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, whole: bool = False) -> bool:
    """Whether `product` can and should compute x [num_tokens, size] times weight. whole: without splitting columns."""
    aligned = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if not aligned or x.dtype != weight.dtype:
        return False
    return x.shape[0] in (num_tokens_whole(weight) if whole else num_tokens_taken(weight, gated))


@functools.cache
def _hopper() -> tuple[Any, Any]:
    """(the kernel, `descriptor`). Gluon is not in every Triton, so they are imported at the first use."""
    from nanovllm.kernels.triton.gemm.hopper_product_kernel import hopper_product_kernel
    from nanovllm.kernels.triton.gluon_compat import descriptor

    return hopper_product_kernel, descriptor


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, split: bool = False,
    plan: HopperProductPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + b, or if gated silu(x G^T) * (x U^T), for arguments that `takes` accepts.

    Args:
        x: [num_tokens, size], bfloat16 or float16.
        weight: [rows, size]; if gated the rows of the gate, then the rows of the up projection.
        split: return float32 sums [splits, num_tokens, rows] of parts of the columns, without bias.
        plan: in place of the tuned plan, or of the one that `plan_hopper_product` makes.
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
    first = FIRST_TILE.get(tokens, tokens)
    kernel, descriptor = _hopper()
    # Tiles of 64 columns are the outermost dimension: one request brings a group of tiles, one after the other.
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
        y, num_tokens, OUTPUTS=outputs, TOKENS=first, MORE=tokens - first, CHUNKS=plan.chunks, SLOTS=plan.slots,
        ROUNDS=plan.rounds, SPLITS=plan.splits, GATED=gated, BIAS=bias is not None, num_warps=4,
        launch_pdl=are_constant(weight, bias),
    )  # fmt: skip
    return y
