"""From one block's output to the next block's projection: residual addition, norm, and the product with the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, at_least_one, product_cost
from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.norm import add_rms_norm, norm_inputs, rms_norm

# The reference itself rounds four to six times on the way, and the products of the norm's roundings add up.
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
# (tokens, outputs, size): sizes that are no power of two or span several tiles, and no token.
_SMALL = [(1, 2, 1), (1, 37, 1000), (2, 9, 33), (5, 24, 2100), (0, 8, 16), (9, 16, 64)]


def _inputs(t, tokens, outputs, size):
    return {
        "x": t.normal(tokens, size),
        **norm_inputs(t, tokens, size),
        # Weights that keep the variance of what they are applied to, as trained ones about do.
        "weight": t.parameter(outputs, size, scale=size**-0.5),
    }


def after_norm_cost(x, residual, norm_weight, weight, *read, written=None, fp8=False):
    """Of a product with a norm of x and a residual, whose sum is written too. The rest: as of `product_cost`."""
    given = norm_weight, residual, residual, weight, *read
    return product_cost(x, weight.shape[0], *given, written=written, more_flops=5 * x.numel(), fp8=fp8)


def _normed(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return rms_norm.native(x, norm_weight, eps), x
    return add_rms_norm.native(x, residual, norm_weight, eps)


@op(
    arguments={
        "x": "[..., size]", "residual": "[..., size]", "norm_weight": "[size]", "weight": "[outputs, size]",
        "bias": "[outputs]",
    },
    inputs=Inputs(
        _inputs,
        needs=at_least_one("size"),
        small=_SMALL,
        # QKV projections of Qwen3 0.6B, 1.7B and 8B.
        decode=[(1, 4096, 1024), (8, 4096, 1024), (64, 4096, 1024), (1, 4096, 2048), (1, 6144, 4096)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, residual, norm_weight, eps, weight, bias=None: after_norm_cost(
        x, residual, norm_weight, weight, bias
    ),
    tolerance=_TOLERANCE,
    fuses=("add_rms_norm", "rms_norm", "linear"),
)  # fmt: skip
def add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(residual + x) W^T + b, and residual + x.

    Args:
        x: [..., size]; residual: the same, or None: x is the residual stream itself.
        norm_weight: [size]; weight: [outputs, size]; bias: [outputs] or None; one float dtype.
        eps: the eps of the norm, as in `rms_norm`.

    Returns:
        (y [..., outputs], new residual [..., size]), same dtype. Rounded as the ops that it is made of round: the sum,
        the normalised value before and after its weight, the product. Without a residual the second may be x itself.
    """
    y, residual = _normed(x, residual, norm_weight, eps)
    return F.linear(y, weight, bias), residual


@op(
    arguments={"x": "[..., size]", "residual": "[..., size]", "norm_weight": "[size]", "weight": "[2*outputs, size]"},
    inputs=Inputs(
        lambda t, tokens, outputs, size: _inputs(t, tokens, 2 * outputs, size),
        needs=at_least_one("size"),
        small=_SMALL,
        # Qwen3 0.6B, 1.7B and 8B.
        decode=[(1, 3072, 1024), (8, 3072, 1024), (64, 3072, 1024), (1, 6144, 2048), (1, 12288, 4096)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, residual, norm_weight, eps, weight: after_norm_cost(
        x, residual, norm_weight, weight, written=weight.shape[0] // 2
    ),
    tolerance=_TOLERANCE,
    fuses=("add_rms_norm", "rms_norm", "silu_and_mul", "linear", "linear_silu_and_mul"),
)
def add_rms_norm_gate_up(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(n G^T) * (n U^T) with n = rms_norm(residual + x), and residual + x: the first half of a gated MLP.

    Args:
        x: [..., size]; residual: the same, or None: x is the residual stream itself.
        norm_weight: [size]; weight: [2 * outputs, size], first the gate's rows, then the up projection's; one dtype.
        eps: the eps of the norm, as in `rms_norm`.

    Returns:
        ([..., outputs], new residual [..., size]), same dtype. Rounded as the ops that it is made of round, so gate, up
        and SiLU each before the product. Without a residual the second may be x itself.
    """
    y, residual = _normed(x, residual, norm_weight, eps)
    return silu_and_mul.native(F.linear(y, weight)), residual
