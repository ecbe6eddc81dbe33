"""Token embedding with a packed table."""

from __future__ import annotations

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.checks import check_token_ids, values_checked
from nanovllm.kernels.ops.gguf_blocks import dequantise_gguf
from nanovllm.kernels.ops.linear_fp8 import block_shape, dequantise_fp8
from nanovllm.kernels.ops.linear_int4 import dequantise_affine, unpack_int4
from nanovllm.kernels.ops.linear_packed import SCALES, check_storage, needs_storage, weight_inputs


def _inputs(t, num_tokens, vocab_size, size, storage=2):
    """storage: as of `linear_packed_silu_and_mul`."""
    made = weight_inputs(t, 0, vocab_size, size, storage)
    del made["x"]
    return {"token_ids": t.integers(0, vocab_size, num_tokens), **made, "size": size, "dtype": t.dtype}


def _needs(numbers):
    return "VOCAB_SIZE of at least 1" if numbers["vocab_size"] < 1 else needs_storage(numbers)


def _cost(token_ids, storage, weight, scale, zero, size, dtype):
    tokens = token_ids.numel()
    row = sum(nbytes(t) // max(1, t.shape[0]) for t in (weight, scale, zero) if t is not None)
    return Cost(nbytes(token_ids) + tokens * (row + size * dtype.itemsize))


def dequantise_packed(
    storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, size: int
) -> torch.Tensor:
    """A weight in any form of storage as float32 [rows, size]. Operands: as of `linear_packed_silu_and_mul`."""
    if scale is None:
        return dequantise_gguf(weight, storage, size)
    if storage == "fp8":
        return dequantise_fp8(weight, scale)
    q, middle = (unpack_int4(weight), 8) if storage == "int4" else (weight, 128)
    return dequantise_affine(q, scale, middle if zero is None else zero)


@op(
    arguments={
        "token_ids": "int64[...] | int32[...]",
        "weight": "uint8[vocab_size, bytes] | float8_e4m3fn[vocab_size, bytes]", **SCALES,
    },
    inputs=Inputs(
        _inputs,
        needs=_needs,
        # Each form of storage; no power of two, several tiles, no token.
        small=[
            (1, 5, 32), (2, 9, 96, 2), (5, 72, 1024), (3, 200, 320, 1), (0, 8, 32), (9, 33, 160, 3), (17, 20, 512, 4),
            (2, 37, 256, 5), (33, 40, 64, 6), (4, 24, 120),
        ],
        # Qwen3-8B.
        decode=[(1, 151936, 4096, 5), (8, 151936, 4096, 4), (64, 151936, 4096)],
        large=[(16384, 151936, 4096, 5)],
        scales=(1.0,),
    ),
    cost=_cost,
    fake=lambda token_ids, storage, weight, scale, zero, size, dtype: weight.new_empty(
        (*token_ids.shape, size), dtype=dtype
    ),
)  # fmt: skip
def embedding_packed(
    token_ids: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    size: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`embedding` with a packed table: the row of each token, dequantised.

    Args:
        token_ids: int64 or int32 [...], from 0 to vocab_size - 1.
        storage, weight, scale, zero: as of `linear_packed_silu_and_mul`, [vocab_size, ...].
        size: columns of the table.
        dtype: float16, bfloat16 or float32.

    Returns:
        [..., size] of `dtype`: computed in float32, rounded once.

    Raises:
        ValueError: as `linear_packed_silu_and_mul`.
    """
    check_storage(storage, scale)
    index = token_ids.reshape(-1)
    if values_checked(token_ids.device):
        check_token_ids(index, weight.shape[0])
    rows = weight.view(torch.uint8)[index].view(weight.dtype)
    if scale is not None:
        scale = scale[index // block_shape(weight, scale)[0] if storage == "fp8" else index]
    values = dequantise_packed(storage, rows, scale, None if zero is None else zero[index], size)
    return values.to(dtype).view(*token_ids.shape, size)
