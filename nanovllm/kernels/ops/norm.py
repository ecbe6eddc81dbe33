"""Root-mean-square normalisation (Zhang and Sennrich, 2019), alone and with the residual addition before it."""

import torch

from nanovllm.kernels.registry import op


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded to the input's dtype before the weight is applied: transformers' order, which decides ties.
    return weight * wide.to(x.dtype)


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    Args:
        x: [..., size]; weight: [size], same dtype.

    Returns:
        [..., size], the dtype of x.
    """
    return _rms_norm(x, weight, eps)


@op
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x, and its RMS norm: what lies between two blocks of a pre-norm decoder.

    Args:
        x, residual: [..., size], same dtype; weight: [size].

    Returns:
        (normalised, new residual), both [..., size]. The sum is rounded to the dtype before it is normalised.
        A provider may reuse the memory of `x` and `residual`: neither is to be read after the call.
    """
    residual = residual + x
    return _rms_norm(residual, weight, eps), residual
