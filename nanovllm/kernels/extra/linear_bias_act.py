"""A linear layer with its bias and activation."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.op.dispatch import op

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


def _cost(x, weight, bias=None, activation="none"):
    m, n = x.numel() // max(1, x.shape[-1]), weight.shape[0]
    return Cost(nbytes(x, weight, bias) + m * n * x.element_size(), 2 * m * n * x.shape[-1])


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
    cost=_cost,
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
    check_linear(x, weight, bias, activation)
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
    """Raise a ValueError that names the first wrong argument of `linear_bias_act`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    if not x.is_floating_point() or not x.dim():
        raise ValueError(f"x: expected a float tensor [..., k], not {x.dtype} of shape {tuple(x.shape)}")
    check_like(x, "weight", weight, (None, x.shape[-1]))
    if bias is not None:
        check_like(x, "bias", bias, (weight.shape[0],))


def check_like(x: torch.Tensor, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise a ValueError unless `tensor` has the dtype and device of x and this shape (None: any size)."""
    given = tuple(tensor.shape)
    if len(given) != len(shape) or any(want not in (None, got) for want, got in zip(shape, given)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{expected}] for x of shape {tuple(x.shape)}, not {list(given)}")
    if tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(f"{name}: expected {x.dtype} on {x.device}, as x, not {tensor.dtype} on {tensor.device}")
