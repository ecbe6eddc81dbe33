"""GELU of a sum with a bias: what follows a linear layer in GPT-like models."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.op.dispatch import op


def _inputs(t, rows, size, full_bias=0):
    return {"x": t.normal(rows, size), "bias": t.normal(*((rows, size) if full_bias else (size,)))}


@op(
    arguments={"x": "[..., n]", "bias": "[n] | [..., n]"},
    inputs=Inputs(
        _inputs,
        small=[(1, 1), (3, 96), (0, 64), (7, 33), (5, 1025, 1), (2, 33000)],
        decode=[(1, 3072), (64, 3072), (256, 4096)],
        large=[(2048, 4096), (8192, 4096), (8192, 4096, 1)],
        variants=[{"approximate": "tanh"}, {"approximate": "none"}],
    ),
    cost=lambda x, bias, approximate="tanh": Cost(nbytes(x, bias, x), 10 * x.numel()),
    cancels=True,
)
def fused_add_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """gelu(x + bias) (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).

    Args:
        x: [..., n], any float dtype; bias: [n] or the shape of x, same dtype.
        approximate: "tanh", x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), or "none",
            x / 2 * (1 + erf(x / sqrt(2))).

    Returns:
        [..., n], same dtype. The sum is rounded to that dtype before the GELU, as two PyTorch operations would.

    Raises:
        ValueError: another `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    return F.gelu(x + bias, approximate=approximate)
