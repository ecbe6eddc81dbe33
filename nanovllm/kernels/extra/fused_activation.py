"""The usual activations by name."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.op.dispatch import op

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
