"""Linear layers whose weights are stored in 4 or 8 bits, with a scale and a zero point for each group of columns."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, product_cost


def group_size(size: int, scale: torch.Tensor) -> int:
    """Columns of a group, for a weight with `size` columns and scale [outputs, groups].

    Raises:
        ValueError: the groups do not divide the columns.
    """
    groups = scale.shape[1]
    if not groups or size % groups:
        raise ValueError(
            f"scale: {groups} groups do not divide {size} columns; expected [outputs, groups] with groups of equally "
            f"many columns, not {list(scale.shape)}"
        )
    return size // groups


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, size / 2] -> uint8 [outputs, size], 0 to 15. The low four bits of a byte are the even column."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_int4`: integers 0 to 15 [outputs, size] -> uint8 [outputs, size / 2]; size is even."""
    values = values.to(torch.uint8)
    return values[..., ::2] | values[..., 1::2] << 4


def dequantise_affine(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(q - z) * s, computed in `dtype`: [outputs, size].

    Args:
        values: q, uint8 [outputs, size].
        scale: s, [outputs, groups], any float dtype.
        zero: z, uint8 [outputs, groups], or one number for all groups.
    """
    width = group_size(values.shape[1], scale)
    q = values.to(dtype).unflatten(1, (scale.shape[1], width))
    z = zero.to(dtype)[..., None] if isinstance(zero, torch.Tensor) else zero
    return ((q - z) * scale.to(dtype)[..., None]).flatten(1)


def affine_inputs(t, tokens, outputs, size, group, bits):
    """Weights that keep the variance of what they are applied to, as trained ones about do."""
    columns = size * bits // 8
    scale_dtype = torch.float32 if t.dtype == torch.float64 else t.dtype  # checkpoints have no scales of 64 bits
    spread = (2**bits) * 12**-0.5  # of numbers that are uniform in a range of this length
    scale = t.uniform(outputs, size // group, low=0.5, high=1.5) * (size**-0.5 / spread)
    return {
        "x": t.normal(tokens, size),
        "weight": torch.nn.Parameter(t.integers(0, 256, outputs, columns, dtype=torch.uint8), requires_grad=False),
        "scale": torch.nn.Parameter(scale.to(scale_dtype), requires_grad=False),
        "zero": torch.nn.Parameter(
            t.integers(0, 2**bits, outputs, size // group, dtype=torch.uint8), requires_grad=False
        ),
    }


def _inputs_int4(t, tokens, outputs, size, group=128):
    return affine_inputs(t, tokens, outputs, size, group, 4)


def _inputs_int8(t, tokens, outputs, size, group=128):
    return affine_inputs(t, tokens, outputs, size, group, 8)


def _needs(numbers):
    size, group = numbers["size"], numbers["group"]
    if size < 1 or group < 1 or size % group:
        return f"SIZE of at least 1 that is a multiple of GROUP, not {size} and {group}"
    return None


def _needs_even(numbers):
    if numbers["size"] % 2:
        return f"an even SIZE, not {numbers['size']}"
    return _needs(numbers)


def _cost(x, weight, scale, zero=None, bias=None):
    return product_cost(x, weight.shape[0], weight, scale, zero, bias)


_ARGUMENTS = {
    "x": "[..., size]", "weight": "uint8[outputs, size]",
    "scale": "float16[outputs, groups] | bfloat16[outputs, groups] | float32[outputs, groups]",
    "zero": "uint8[outputs, groups]", "bias": "[outputs]",
}  # fmt: skip
_INPUTS = Inputs(
    _inputs_int8,
    needs=_needs,
    small=[
        (1, 1, 1, 1), (1, 37, 1024), (2, 9, 96, 32), (5, 136, 640), (0, 8, 16, 16), (9, 48, 64, 64), (17, 130, 384),
        (33, 64, 120, 24), (3, 24, 125, 125),
    ],
    # Output and down projections of Qwen3-0.6B and 8B.
    decode=[(1, 1024, 2048), (8, 1024, 3072), (1, 4096, 4096), (8, 4096, 4096), (1, 4096, 12288), (32, 4096, 12288)],
    large=[(2048, 1024, 3072), (8192, 4096, 4096)],  # chunks of prompts
    variants=[{}, {"zero": None}],
    scales=(1.0, 50.0),
)  # fmt: skip
_EVEN_SIZES = [(1, 1, 2, 2), *_INPUTS.small[1:-1], (3, 24, 250, 125)]


@op(
    arguments={**_ARGUMENTS, "x": "[..., 2*half]", "weight": "uint8[outputs, half]"},
    inputs=replace(_INPUTS, make=_inputs_int4, needs=_needs_even, small=_EVEN_SIZES),
    cost=_cost,
)
def linear_int4(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b with W = (q - z) * s, where q has 4 bits, and z and s belong to groups of columns of a row.

    Args:
        x: [..., size], size even.
        weight: uint8 [outputs, size / 2]; the low four bits of a byte are q of the even column, the high ones of the
            odd column that follows.
        scale: s, float16, bfloat16 or float32 [outputs, groups]; groups divides size.
        zero: z, uint8 [outputs, groups], 0 to 15; None: 8.
        bias: [outputs], of x's dtype, or None.

    Returns:
        [..., outputs], x's dtype. This reference rounds W to x's dtype before the product.

    Raises:
        ValueError: the groups do not divide the columns.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    w = dequantise_affine(unpack_int4(weight), scale, 8 if zero is None else zero, wide)
    return F.linear(x, w.to(x.dtype), bias)


@op(arguments=_ARGUMENTS, inputs=_INPUTS, cost=_cost)
def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b with W = (q - z) * s, where q has 8 bits, and z and s belong to groups of columns of a row.

    Args:
        x: [..., size].
        weight: q, uint8 [outputs, size], 0 to 255. A signed number is stored with 128 added.
        scale: s, float16, bfloat16 or float32 [outputs, groups]; groups divides size.
        zero: z, uint8 [outputs, groups]; None: 128.
        bias: [outputs], of x's dtype, or None.

    Returns:
        [..., outputs], x's dtype. This reference rounds W to x's dtype before the product.

    Raises:
        ValueError: the groups do not divide the columns.
    """
    w = dequantise_affine(weight, scale, 128 if zero is None else zero, torch.promote_types(x.dtype, torch.float32))
    return F.linear(x, w.to(x.dtype), bias)
