"""The op `packed_to_fp8`: of int4, 16 codes for each group, and a look into this table for each weight."""

from __future__ import annotations

import torch

from nanovllm.kernels.cuda.packed.product_libraries import rounding_kernel
from nanovllm.kernels.cuda.packed.stored import GROUP, KernelWeight, affine
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton.gemm import packed_to_fp8 as of_triton
from nanovllm.kernels.triton.launch_arguments import adjacent

_MOST = 2**27
"""Rows or columns: a grid has at most 65,535 blocks of 4,096 columns."""


def kernel_weight(
    storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, size: int
) -> KernelWeight | None:
    """The weight if the kernel takes it: int4 whose columns are a multiple of 128, in groups of 128 times a power of
    two or in whole rows, with scales of 16 bits, and rows that can be read 8 bytes at a time. None: Triton's does.
    """
    if storage != "int4" or scale is None or scale.dtype not in (torch.float16, torch.bfloat16):
        return None
    if not size or size % GROUP or not 0 < weight.shape[0] <= _MOST or size > _MOST:
        return None
    if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.data_ptr() % 8:
        return None
    return affine(size, weight, scale, zero, 4, scale.dtype)


def packed_to_fp8(
    storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, size: int,
    factor: torch.Tensor, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `packed_to_fp8`. out: contiguous."""
    check_storage(storage, scale)
    made = weight.new_empty((weight.shape[0], size), dtype=torch.float8_e4m3fn) if out is None else out
    w = kernel_weight(storage, weight, scale, zero, size)
    if w is None or made.data_ptr() % 16:
        return of_triton.packed_to_fp8(storage, weight, scale, zero, size, factor, made)
    codes = made.view(torch.uint8)
    rounding_kernel(weight.device)(w.codes, w.scale, w.zero, adjacent(factor), codes, w.step_shift)
    return made
