"""Over the last dimension: layer normalisation (Ba et al., 2016) and softmax."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes


def _layer_norm_inputs(t, rows, size):
    return {
        "x": t.normal(rows, size),
        "weight": t.parameter(size, scale=1),
        "bias": t.parameter(size, scale=1),
        "eps": 1e-5,
    }


@op(
    arguments={"x": "[..., size]", "weight": "[size]", "bias": "[size]"},
    inputs=Inputs(
        _layer_norm_inputs,
        small=[(1, 2), (3, 96), (0, 64), (7, 33), (2, 1024), (1, 1025), (2, 33000)],
        decode=[(1, 1024), (64, 1024), (256, 5120)],
        large=[(8192, 1024), (16384, 4096), (4096, 5120)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, weight, bias, eps: Cost(nbytes(x, weight, bias, x), 8 * x.numel()),
)
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, computed in float32, rounded once.

    Args:
        x: [..., size], any float dtype; weight, bias: [size], same dtype.
        eps: added to the variance.

    Returns:
        [..., size], the dtype of x.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op(
    arguments={"x": "[..., size]"},
    inputs=Inputs(
        lambda t, rows, size: {"x": t.normal(rows, size)},
        small=[(1, 1), (3, 96), (0, 64), (7, 33), (2, 1024), (1, 1025), (2, 33000)],
        decode=[(1, 151936), (64, 4096), (256, 4096)],
        large=[(16384, 4096), (16384, 16384)],
    ),
    cost=lambda x: Cost(2 * nbytes(x), 5 * x.numel()),
)
def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x - max) / sum(exp(x - max)) over the last dimension, computed in float32, rounded once.

    Args:
        x: [..., size], any float dtype. -inf gives 0; a row of nothing but -inf gives NaN.

    Returns:
        The shape and dtype of x.
    """
    return torch.softmax(x, dim=-1)
