"""Softmax over the last dimension."""

import torch

from nanovllm.kernels.op.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.op.dispatch import op


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
