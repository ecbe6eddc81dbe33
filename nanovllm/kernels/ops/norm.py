"""Root-mean-square normalisation (Zhang and Sennrich, 2019), alone and with the residual addition before it."""

from typing import Any

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded to the input's dtype before the weight is applied: transformers' order, which decides ties.
    return weight * wide.to(x.dtype)


# Hidden sizes of Qwen3 (0.6B to 32B); heads of a fused projection; sizes that are no power of two or too long for
# registers.
_SHAPES: dict[str, Any] = {
    "small": [(1, 1), (3, 96), (0, 64), (7, 33), (2, 1024), (1, 1025), (2, 33000)],
    "decode": [(1, 1024), (64, 1024), (256, 1024), (256, 4096), (256, 5120)],
    "large": [(8192, 1024), (16384, 4096), (4096, 5120)],
    "scales": (1.0, 50.0),
}


@op(
    arguments={"x": "[..., size]", "weight": "[size]"},
    inputs=Inputs(
        lambda t, rows, size: {"x": t.normal(rows, size), "weight": t.parameter(size, scale=1), "eps": 1e-6}, **_SHAPES
    ),
    cost=lambda x, weight, eps: Cost(nbytes(x, weight, x), 4 * x.numel()),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.

    Args:
        x: [..., size], any float dtype; weight: [size], same dtype.
        eps: added to the mean of the squares.

    Returns:
        [..., size], the dtype of x.
    """
    return _rms_norm(x, weight, eps)


def _add_rms_norm_inputs(t, rows, size):
    x, (residual, weight, eps) = t.normal(rows, size), norm_inputs(t, rows, size).values()
    return {"x": x, "residual": residual, "weight": weight, "eps": eps}


def norm_inputs(t, rows, size):
    """For `Inputs` of an op that adds to a residual and normalises the sum."""
    return {"residual": t.normal(rows, size), "norm_weight": t.parameter(size, scale=1), "eps": 1e-6}


@op(
    arguments={"x": "[..., size]", "residual": "[..., size]", "weight": "[size]"},
    inputs=Inputs(_add_rms_norm_inputs, **_SHAPES),
    cost=lambda x, residual, weight, eps: Cost(2 * nbytes(x, residual) + nbytes(weight), 5 * x.numel()),
    # Three roundings: the sum's, the normalised value's and that of its product with the weight. 3 x 2^-11 is 1.47e-3.
    tolerance={torch.float16: 1.5e-3},
    reuses=("x", "residual"),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x, and its RMS norm: what lies between two sublayers of a pre-norm decoder.

    Args:
        x, residual: [..., size], any float dtype; weight: [size]; one dtype.
        eps: as in `rms_norm`.

    Returns:
        (normalised, new residual), both [..., size]. The sum is rounded to the dtype before it is normalised.
        A provider may reuse the memory of `x` and `residual`: neither is to be read after the call.
    """
    residual = residual + x
    return _rms_norm(residual, weight, eps), residual
