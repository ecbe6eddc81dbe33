"""What is computed element by element: multiply and add, the usual activations by name, and GELU of a sum."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes


def _mul_add_inputs(t, rows, size, broadcast=0):
    shape = (size,) if broadcast else (rows, size)
    return {"a": t.normal(rows, size), "b": t.normal(*shape), "c": t.normal(*shape)}


@op(
    arguments={"a": "[..., n]", "b": "[n] | [..., n]", "c": "[n] | [..., n]"},
    inputs=Inputs(
        _mul_add_inputs,
        small=[(1, 1), (3, 96), (0, 64), (7, 33), (2, 1025, 1), (2, 33000)],
        decode=[(1, 1024), (64, 1024), (256, 5120), (256, 5120, 1)],
        large=[(2048, 4096), (2048, 4096, 1), (16384, 4096)],
    ),
    cost=lambda a, b, c: Cost(nbytes(a, b, c, a), 2 * a.numel()),
    cancels=True,
)
def element_wise_mul_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c.

    Args:
        a: [..., n], any float dtype; b, c: the shape of a, or [n], same dtype.

    Returns:
        The shape and dtype of a. The product is rounded to that dtype before the sum.
    """
    return a * b + c


_FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
}


@op(
    arguments={"x": "[...]"},
    inputs=Inputs(
        lambda t, rows, size: {"x": t.normal(rows, size)},
        small=[(1, 1), (3, 96), (0, 64), (7, 33), (2, 33000)],
        decode=[(1, 4096), (64, 4096), (256, 4096)],
        large=[(8192, 4096), (16384, 16384)],
        variants=[{"kind": kind} for kind in _FUNCTIONS],
    ),
    cost=lambda x, kind: Cost(2 * nbytes(x), 8 * x.numel()),
    cancels=True,
)
def fused_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """An activation, computed in float32 and rounded once.

    Args:
        x: any shape and float dtype.
        kind: "gelu" (with erf), "gelu_tanh", "silu" (x / (1 + e^-x)), "mish" (x tanh(log(1 + e^x))) or "relu".

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: another kind.
    """
    if kind not in _FUNCTIONS:
        raise ValueError(f"kind: expected one of {', '.join(_FUNCTIONS)}, not {kind!r}")
    return _FUNCTIONS[kind](x)


def _add_gelu_inputs(t, rows, size, full_bias=0):
    return {"x": t.normal(rows, size), "bias": t.normal(*((rows, size) if full_bias else (size,)))}


@op(
    arguments={"x": "[..., n]", "bias": "[n] | [..., n]"},
    inputs=Inputs(
        _add_gelu_inputs,
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
