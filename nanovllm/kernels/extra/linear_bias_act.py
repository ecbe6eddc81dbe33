"""A linear layer with its bias and activation."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, at_least_one, product_cost

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _inputs(t, m, k, n, transposed=0):
    """The weight's scale keeps the sums at the scale of x; `transposed`: the weight is a view of a [k, n] matrix."""
    weight = t.normal(k, n, scale=k**-0.5).t() if transposed else t.normal(n, k, scale=k**-0.5)
    return {"x": t.normal(m, k), "weight": weight, "bias": t.normal(n)}


@op(
    arguments={"x": "[..., k]", "weight": "[n, k]", "bias": "[n]"},
    inputs=Inputs(
        _inputs,
        needs=at_least_one("k"),
        small=[(1, 64, 48), (5, 33, 70), (0, 64, 48), (17, 128, 96, 1), (70, 40, 130)],
        # QKV and down projections of Qwen3-0.6B, QKV of Qwen3-8B.
        decode=[
            (1, 1024, 4096),
            (1, 3072, 1024),
            (1, 4096, 6144),
            (16, 1024, 4096),
            (64, 1024, 4096),
            (256, 4096, 6144),
        ],
        large=[(2048, 1024, 4096), (8192, 4096, 6144)],
        variants=[{"activation": name} for name in ("silu", "none", "relu", "gelu", "gelu_tanh")],
    ),
    cost=lambda x, weight, bias=None, activation="none": product_cost(x, weight.shape[0], weight, bias),
    # The sum is rounded once more by the reference than by a fused epilogue, and adds k products in any order.
    tolerance={torch.float16: 2e-3, torch.float32: 2e-5},
)
def linear_bias_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """activation(x @ weight^T + bias).

    Args:
        x: [..., k], any float dtype and strides.
        weight: [n, k], same dtype; any strides, so the transposed view of a [k, n] matrix is one.
        bias: [n], same dtype, or None.
        activation: "none", "relu", "gelu" (with erf), "gelu_tanh" or "silu".

    Returns:
        [..., n], contiguous, same dtype. This reference rounds the product with its bias to that dtype and then the
        activation of that. A kernel that computes the activation in the matrix product's epilogue keeps float32 until
        one rounding at the end, so it agrees to the dtype's rounding of the sum's magnitude, not bit for bit.

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together, or another activation.
    """
    check_activation(activation)
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def check_activation(activation: str, known: Iterable[str] = ACTIVATIONS) -> None:
    """Raise a ValueError for an unknown activation. The patterns of an op's arguments check its tensors."""
    if activation not in known:
        raise ValueError(f"activation: expected one of {', '.join(known)}, not {activation!r}")
