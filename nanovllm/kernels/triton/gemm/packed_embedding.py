"""The op `embedding_packed`: one kernel gathers the rows of tokens and dequantises them."""

from __future__ import annotations

import torch

from nanovllm.kernels import ops
from nanovllm.kernels.ops.checks import check_token_ids, values_checked
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton.gemm.packed_dequantise import dequantised_packed


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
    rows = dequantised_packed(storage, weight, scale, zero, size, dtype, index=index)
    if rows is None:
        return ops.embedding_packed.native(token_ids, storage, weight, scale, zero, size, dtype)
    return rows.view(*token_ids.shape, size)
