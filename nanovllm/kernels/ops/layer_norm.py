"""Layer normalisation (Ba et al., 2016)."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.registry import op


@op
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, computed in float32, rounded once.

    Args:
        x: [..., size], any float dtype; weight, bias: [size], same dtype.

    Returns:
        [..., size], the dtype of x.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
