"""A linear layer whose weight is stored in 8-bit floats (e4m3), with a scale for each block of the weight."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, product_cost

BLOCK = 128
"""Rows or columns of a block, in checkpoints with scales by blocks."""


def block_shape(weight: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of the weight that share a scale, from the shapes of weight [N, K] and scale.

    scale.shape[0] is 1 (the block has all N rows), N (one row) or ceil(N / 128) (128 rows). scale.shape[1] is 1 (all K
    columns) or ceil(K / 128) (128 columns). For an N or K where two of these are the same number, so is what they mean.

    Raises:
        ValueError: scale has another shape. The message has both shapes.
    """
    (outputs, size), (rows, columns) = weight.shape, scale.shape
    height = outputs if rows == 1 else 1 if rows == outputs else BLOCK if rows == -(-outputs // BLOCK) else None
    width = size if columns == 1 else BLOCK if columns == -(-size // BLOCK) else None
    if height is None or width is None:
        raise ValueError(
            f"scale: expected [1, {outputs} or {-(-outputs // BLOCK)}, 1 or {-(-size // BLOCK)}] for a weight "
            f"{list(weight.shape)}: a scale for the whole weight, for each row, or for blocks of {BLOCK} rows or "
            f"{BLOCK} columns; not {list(scale.shape)}"
        )
    return max(1, height), max(1, width)


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight [N, K] times the scale of each of its blocks, computed in `dtype`: [N, K]. See `linear_fp8`."""
    height, width = block_shape(weight, scale)
    scale = scale.to(dtype)
    if scale.shape[0] not in (1, weight.shape[0]):
        scale = scale.repeat_interleave(height, 0)[: weight.shape[0]]
    if scale.shape[1] != 1:
        scale = scale.repeat_interleave(width, 1)[:, : weight.shape[1]]
    return weight.to(dtype) * scale


def fp8_inputs(t, tokens, outputs, size, scale_rows=BLOCK, scale_columns=BLOCK):
    """For `Inputs`. scale_rows, scale_columns: of a block; 0: all."""
    # Standard deviation 64, so that the largest numbers, 448, occur.
    weight = t.normal(outputs, size, dtype=torch.float32, scale=64.0).clamp_(-448, 448).to(torch.float8_e4m3fn)
    shape = [-(-n // block) if block else 1 for n, block in ((outputs, scale_rows), (size, scale_columns))]
    scale = t.uniform(*shape, low=0.5, high=1.5, dtype=torch.float32) * (size**-0.5 / 64)
    return {
        "x": t.normal(tokens, size),
        "weight": torch.nn.Parameter(weight, requires_grad=False),
        "scale": torch.nn.Parameter(scale, requires_grad=False),
    }


def needs(numbers):
    if numbers["size"] < 1:
        return f"SIZE of at least 1, not {numbers['size']}"
    if numbers["scale_rows"] not in (0, 1, BLOCK) or numbers["scale_columns"] not in (0, BLOCK):
        return f"SCALE_ROWS of 0 (all), 1 or {BLOCK}, and SCALE_COLUMNS of 0 (all) or {BLOCK}"
    return None


WEIGHT_ARGUMENTS = {
    "weight": "float8_e4m3fn[outputs, size]", "scale": "float32[scale_rows, scale_columns]", "bias": "[outputs]",
}  # fmt: skip
"""The patterns of a weight of 8-bit floats with its scales."""


@op(
    arguments={"x": "[..., size]", **WEIGHT_ARGUMENTS},
    inputs=Inputs(
        fp8_inputs,
        needs=needs,
        small=[
            (1, 1, 1), (1, 37, 1008, 1, 0), (2, 9, 33, 0, 0), (5, 136, 640), (0, 8, 16), (9, 48, 64, 0, 128),
            (17, 130, 272), (33, 64, 256, 1, 128),
        ],
        # Output and down projections of Qwen3-0.6B and 8B.
        decode=[
            (1, 1024, 2048), (8, 1024, 3072), (1, 4096, 4096), (8, 4096, 4096), (1, 4096, 12288), (32, 4096, 12288),
        ],
        # Chunks of prompts.
        large=[(2048, 1024, 3072), (8192, 4096, 4096)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, weight, scale, bias=None: product_cost(x, weight.shape[0], weight, scale, bias),
)  # fmt: skip
def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b with W = weight * scale, a weight stored in 8-bit floats.

    Args:
        x: [..., size]. It is not quantised.
        weight: float8_e4m3fn [outputs, size]. A kernel may take the codes of NaN for 480 and -480.
        scale: float32 [rows of scales, columns of scales]. The scales are of equal blocks of the weight: the whole
            weight, a row, 128 rows, or all rows; and all columns or 128 columns (`block_shape`).
        bias: [outputs], of x's dtype, or None.

    Returns:
        [..., outputs], x's dtype. This reference rounds W to x's dtype before the product.

    Raises:
        ValueError: the shape of scale fits no such blocks.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # oneDNN's AMX products read beyond a row of a strided x, up to a multiple of 32 columns: a NaN there would spread.
    return F.linear(x.contiguous(), dequantise_fp8(weight, scale, wide).to(x.dtype), bias)
