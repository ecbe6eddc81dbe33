"""A product with a plain weight: by itself, with the gated activation, and with the residual addition and norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, at_least_one, nbytes, product_cost
from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.norm import add_rms_norm, norm_inputs

# The references round gate, up, SiLU and the product, or product, sum and norm, each in its turn, and what they round
# adds up.
ROUNDED_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def _inputs(t, tokens, outputs, size):
    # Weights that keep the variance of what they are applied to, as trained ones about do.
    return {"x": t.normal(tokens, size), "weight": t.parameter(outputs, size, scale=size**-0.5)}


def _normed_inputs(t, tokens, outputs, size):
    norm = norm_inputs(t, tokens, outputs)
    return {**_inputs(t, tokens, outputs, size), **norm}


def normed_cost(x, residual, norm_weight, *read):
    """Of a product whose results are added to a residual, with the norm of the sum. read: as of `product_cost`."""
    moved = nbytes(x, *read, norm_weight) + 3 * nbytes(residual)
    return Cost(moved, 2 * residual.numel() * x.shape[-1] + 5 * residual.numel())


@op(
    arguments={"x": "[..., size]", "weight": "[outputs, size]", "bias": "[outputs]"},
    inputs=Inputs(
        _inputs,
        needs=at_least_one("size"),
        small=[(1, 1, 1), (1, 37, 1000), (2, 9, 33), (5, 24, 2100), (0, 8, 16), (9, 16, 64)],
        # Output and down projections of Qwen3 0.6B and 8B.
        decode=[(1, 1024, 2048), (8, 1024, 2048), (1, 1024, 3072), (8, 1024, 3072), (1, 4096, 12288), (64, 1024, 3072)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, weight, bias=None: product_cost(x, weight.shape[0], weight, bias),
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b.

    Args:
        x: [..., size]; weight: [outputs, size]; bias: [outputs] or None; one float dtype.

    Returns:
        [..., outputs], same dtype, rounded once.
    """
    return F.linear(x, weight, bias)


@op(
    arguments={"x": "[..., size]", "weight": "[2*outputs, size]"},
    inputs=Inputs(
        lambda t, tokens, outputs, size: _inputs(t, tokens, 2 * outputs, size),
        needs=at_least_one("size"),
        # (tokens, outputs, size): no power of two, several tiles, no token.
        small=[(1, 2, 1), (2, 40, 64), (3, 37, 1000), (5, 24, 2112), (0, 8, 16), (9, 72, 320), (33, 136, 192)],
        # Qwen3 0.6B and 8B.
        decode=[(8, 3072, 1024), (32, 3072, 1024), (64, 3072, 1024), (8, 12288, 4096), (32, 12288, 4096)],
        # A prompt's worth, of a number that fills no tile: Qwen3 0.6B and 1.7B.
        large=[(8191, 3072, 1024), (4099, 6144, 2048)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, weight: product_cost(x, weight.shape[0], weight, written=weight.shape[0] // 2),
    cancels=True,
    tolerance=ROUNDED_TOLERANCE,
    fuses=("linear", "silu_and_mul"),
)
def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T): a gated MLP up to its down projection (Shazeer, "GLU variants improve transformer", 2020).

    Args:
        x: [..., size]; weight: [2 * outputs, size], the rows of the gate, then those of the up projection; one dtype.

    Returns:
        [..., outputs], same dtype. Gate, up, SiLU and the product are each rounded, as the ops that it is made of
        round.
    """
    return silu_and_mul.native(F.linear(x, weight))


@op(
    arguments={
        "x": "[..., size]", "weight": "[outputs, size]", "residual": "[..., outputs]", "norm_weight": "[outputs]",
        "bias": "[outputs]",
    },
    inputs=Inputs(
        _normed_inputs,
        needs=at_least_one("size"),
        # (tokens, outputs, size): no power of two, several tiles, no token.
        small=[(1, 2, 1), (2, 37, 64), (3, 128, 1000), (5, 24, 2112), (0, 8, 16), (9, 72, 320), (33, 136, 192)],
        # Output and down projections of Qwen3 0.6B and 8B.
        decode=[(8, 1024, 2048), (32, 1024, 2048), *((n, 1024, 3072) for n in (8, 32, 64)), (32, 4096, 12288)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, weight, residual, norm_weight, eps, bias=None: normed_cost(x, residual, norm_weight, weight, bias),
    tolerance=ROUNDED_TOLERANCE,
    fuses=("add_rms_norm", "linear"),
)  # fmt: skip
def linear_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(residual + x W^T + b), and the sum that it is the norm of.

    Args:
        x: [..., size]; weight: [outputs, size]; bias: [outputs] or None; one float dtype.
        residual: [..., outputs]; norm_weight: [outputs], same dtype.
        eps: the eps of the norm, as in `rms_norm`.

    Returns:
        (y [..., outputs], new residual [..., outputs]), same dtype. Rounded as the ops that it is made of round: the
        product, the sum, the normalised value before and after its weight.
    """
    return add_rms_norm.native(F.linear(x, weight, bias), residual, norm_weight, eps)
