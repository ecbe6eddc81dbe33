"""A linear layer by itself."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.op.dispatch import op


def _inputs(t, tokens, outputs, size):
    # Weights that keep the variance of what they are applied to, as trained ones about do.
    return {"x": t.normal(tokens, size), "weight": t.parameter(outputs, size, scale=size**-0.5)}


def _cost(x, weight, bias=None):
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(nbytes(x, weight, bias) + rows * weight.shape[0] * x.element_size(), 2 * rows * weight.numel())


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
    cost=_cost,
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b.

    Args:
        x: [..., size]; weight: [outputs, size]; bias: [outputs] or None; one dtype.

    Returns:
        [..., outputs], same dtype, rounded once.
    """
    return F.linear(x, weight, bias)
