"""The op `linear_fp8` for up to 16 tokens, alone and with what follows. Other calls go to the provider `triton`."""

from __future__ import annotations

import torch

from nanovllm.kernels.cuda.fp8.fp8_cuda_plan import (
    CHUNK,
    LEAST_COLUMNS,
    MAX_TOKENS,
    TILE_ROWS,
    Fp8CudaPlan,
    blocks_of_a_multiprocessor,
    most_columns,
    plan_fp8_cuda,
    shared_bytes,
)
from nanovllm.kernels.cuda.packed.product_libraries import FP8_FOLDER, product_kernel
from nanovllm.kernels.ops.linear_fp8 import block_shape
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm import packed_products
from nanovllm.kernels.triton.gemm.fp8_product import has_99_kib
from nanovllm.kernels.triton.gemm.stream_kernel import finish_splits
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, num_sms

_ALL = 31
"""The shift of row numbers of weights whose rows share scales."""


def runs(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel can run a call: 1 to 16 tokens of 16 bits, multiples of 64 columns, and rows of the weight
    that it can read 16 bytes at a time.
    """
    rows, size = weight.shape
    if x.dtype not in (torch.float16, torch.bfloat16) or x.shape[-1] != size or not size or size % 64:
        return False
    stride, wide = weight.stride(0), weight.stride(1) == 1 and not weight.data_ptr() % 16
    if not 0 < x.numel() <= MAX_TOKENS * size or not rows or not wide or stride % 16 or rows * stride >= 1 << 32:
        return False
    return not has_99_kib(x.device)


def takes(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether the ops use the kernel: it `runs`, and rows are as long as those for which it was faster. gated: so short
    that one block has all columns, too.
    """
    size = weight.shape[1]
    if size < LEAST_COLUMNS or not runs(x, weight):
        return False
    return not gated or size <= most_columns(x.numel() // size)


def num_tokens_gated(weight: torch.Tensor) -> range:
    """For how many tokens `takes` lets a gated call pass, as far as that depends on the columns of the weight."""
    size = weight.shape[1]
    return range(1, 1 + sum(LEAST_COLUMNS <= size <= most_columns(tokens) for tokens in range(1, MAX_TOKENS + 1)))


def fp8_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False,
    sums: bool = False, plan: Fp8CudaPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product of a call that the kernel `runs`: [tokens, rows]; gated: [tokens, rows / 2]; sums: float32 [splits,
    tokens, rows]. gated: at most `most_columns` of the tokens. plan: in place of the built-in one.
    """
    x, tokens, stride = matrix_of(x)
    if stride % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
        stride = x.shape[-1]
    rows, size = weight.shape
    height, _ = block_shape(weight, scale)
    scale = adjacent(scale)
    shift = _ALL if scale.shape[0] == 1 else height.bit_length() - 1
    tiles = cdiv(rows // (1 + gated), TILE_ROWS // (1 + gated))
    plan = plan or plan_fp8_cuda(tokens, tiles, size, sums, num_sms(x))
    chunks = cdiv(size, CHUNK)
    split_chunks = cdiv(chunks, plan.splits)
    splits = cdiv(chunks, split_chunks)
    apart = sums or splits > 1
    if apart:
        y = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    else:
        y = torch.empty((tokens, rows // (1 + gated)), dtype=x.dtype, device=x.device)
    blocks = max(1, min(tiles, blocks_of_a_multiprocessor(plan, tokens) * num_sms(x) // splits))
    numbers = (
        stride, weight.stride(0), scale.stride(0), shift, tokens, rows, size, tiles, split_chunks, gated, apart, blocks,
        splits, plan.warps, shared_bytes(plan, tokens), plan.turns,
    )  # fmt: skip
    bias = adjacent(bias)
    product_kernel(x.device, FP8_FOLDER)(x, weight, scale, bias, y, numbers)
    if sums or not apart:
        return y
    added = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    finish_splits(y, bias, added, "none", False, has_dependent_launch(x.device))
    return added


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The op `linear_fp8`."""
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"bias: expected {x.dtype}, as x, not {bias.dtype}")
    if not takes(x, weight):
        return packed_products.linear_fp8(x, weight, scale, bias)
    return fp8_product(x, weight, scale, bias).view(*x.shape[:-1], weight.shape[0])
