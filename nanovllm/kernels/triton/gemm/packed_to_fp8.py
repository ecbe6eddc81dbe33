"""The op `packed_to_fp8`: one kernel dequantises a weight, scales its rows and rounds to 8-bit floats."""

from __future__ import annotations

import torch

from nanovllm.kernels import ops
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton.gemm.packed_dequantise import dequantised_packed
from nanovllm.kernels.triton.launch_arguments import adjacent


def packed_to_fp8(
    storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, size: int,
    factor: torch.Tensor, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `packed_to_fp8`. GGUF's blocks as stored are rounded by the reference. out: contiguous."""
    check_storage(storage, scale)
    codes = None if out is None else out.view(torch.uint8)
    made = dequantised_packed(
        storage, weight, scale, zero, size, torch.uint8, factor=adjacent(factor), out=codes
    )  # fmt: skip
    if made is None:
        rounded = ops.packed_to_fp8.native(storage, weight, scale, zero, size, factor)
        return rounded if out is None else out.copy_(rounded)
    return made.view(torch.float8_e4m3fn)
