"""Softmax over the last dimension."""

import torch

from nanovllm.kernels.registry import op


@op
def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x - max) / sum(exp(x - max)) over the last dimension, computed in float32, rounded once.

    Args:
        x: [..., size], any float dtype. -inf gives 0; a row of nothing but -inf gives NaN.

    Returns:
        The shape and dtype of x.
    """
    return torch.softmax(x, dim=-1)
