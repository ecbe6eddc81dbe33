"""The op `embedding_packed`: one kernel gathers the rows of tokens and dequantises them."""

from __future__ import annotations

import torch

from nanovllm.kernels import ops
from nanovllm.kernels.ops.checks import check_token_ids, values_checked
from nanovllm.kernels.ops.gguf_blocks import check_gguf
from nanovllm.kernels.ops.linear_fp8 import block_shape
from nanovllm.kernels.ops.linear_int4 import group_size
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton.gemm.packed_dequantise import dequantised, dequantised_gguf, planes_of
from nanovllm.kernels.triton.launch_arguments import adjacent


def embedding_packed(
    token_ids: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    size: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The op `embedding_packed`. GGUF's blocks as stored are dequantised by the reference.

    Ids are checked if `values_checked` says so. Else an id outside of the table reads foreign memory.
    """
    check_storage(storage, scale)
    index = token_ids.reshape(-1).contiguous()
    if values_checked(token_ids.device):
        check_token_ids(index, weight.shape[0])
    if scale is None:
        of, planes = check_gguf(weight, storage, size)
        if not planes:
            return ops.embedding_packed.native(token_ids, storage, weight, scale, zero, size, dtype)
        rows = dequantised_gguf(of, planes_of(of, adjacent(weight), size), size, dtype, index)
    elif storage == "fp8":
        height, width = block_shape(weight, scale)
        codes = adjacent(weight).view(torch.uint8)
        rows = dequantised(
            codes, size, dtype, adjacent(scale), bits=8, floats=True, d_rows=height, d_columns=width, index=index
        )
    else:
        bits, group = int(storage[3:]), group_size(size, scale)
        scale = adjacent(scale)
        if zero is not None and zero.stride(1) != 1:
            zero = zero.contiguous()
        rows = dequantised(
            adjacent(weight), size, dtype, scale, bits=bits, zero=1 << bits - 1 if zero is None else zero,
            d_columns=group, part=group, index=index,
        )  # fmt: skip
    return rows.view(*token_ids.shape, size)
