"""From a block's last projection to the next block's input: the product, residual addition and norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.norm import add_rms_norm


def _inputs(t, tokens, outputs, size):
    return {
        "x": t.normal(tokens, size),
        # Weights that keep the variance of what they are applied to, as trained ones about do.
        "weight": t.parameter(outputs, size, scale=size**-0.5),
        "residual": t.normal(tokens, outputs),
        "norm_weight": t.parameter(outputs, scale=1),
        "eps": 1e-6,
    }


def _cost(x, weight, residual, norm_weight, eps, bias=None):
    moved = nbytes(x, weight, bias, norm_weight) + 3 * nbytes(residual)
    return Cost(moved, 2 * residual.numel() * weight.shape[1] + 5 * residual.numel())


@op(
    arguments={
        "x": "[..., size]", "weight": "[outputs, size]", "residual": "[..., outputs]", "norm_weight": "[outputs]",
        "bias": "[outputs]",
    },
    inputs=Inputs(
        _inputs,
        needs=at_least_one("size"),
        # (tokens, outputs, size): no power of two, several tiles, no token.
        small=[(1, 2, 1), (2, 37, 64), (3, 128, 1000), (5, 24, 2112), (0, 8, 16), (9, 72, 320), (33, 136, 192)],
        # Output and down projections of Qwen3 0.6B and 8B.
        decode=[(8, 1024, 2048), (32, 1024, 2048), *((n, 1024, 3072) for n in (8, 32, 64)), (32, 4096, 12288)],
        scales=(1.0, 50.0),
    ),
    cost=_cost,
    # The reference itself rounds five times on the way, and the products of the norm's roundings add up.
    tolerance={torch.float16: 4e-3, torch.bfloat16: 3.2e-2},
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
        x: [..., size]; weight: [outputs, size]; bias: [outputs] or None; one dtype.
        residual: [..., outputs]; norm_weight: [outputs], same dtype.
        eps: the eps of the norm, as in `rms_norm`.

    Returns:
        (y [..., outputs], new residual [..., outputs]), same dtype. Rounded as the ops that it is made of round: the
        product, the sum, the normalised value before and after its weight.
    """
    return add_rms_norm.native(F.linear(x, weight, bias), residual, norm_weight, eps)
