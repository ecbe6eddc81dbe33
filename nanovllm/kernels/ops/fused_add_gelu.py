"""GELU of a sum with a bias: what follows a linear layer in GPT-like models."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.registry import op


@op
def fused_add_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """gelu(x + bias) (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).

    Args:
        x: [..., n], any float dtype; bias: [n] or the shape of x, same dtype.
        approximate: "tanh", x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), or "none", x / 2 * (1 + erf(x / sqrt(2))).

    Returns:
        [..., n], same dtype. The sum is rounded to that dtype before the GELU, as two PyTorch operations would.

    Raises:
        ValueError: another `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    return F.gelu(x + bias, approximate=approximate)
