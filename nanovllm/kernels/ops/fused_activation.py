"""The usual activations by name."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.registry import op

_FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
}


@op
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
