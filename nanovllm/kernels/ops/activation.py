"""Gated activations."""

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes


def gate_up_inputs(t, rows, intermediate_size):
    """For `Inputs` of an op of a gate and an up projection."""
    return {"gate_up": t.normal(rows, 2 * intermediate_size)}


def gate_up_cost(gate_up, **_):
    """Both halves are read, and one half is written."""
    return Cost(nbytes(gate_up) * 3 // 2, 5 * gate_up.numel() // 2)


# Intermediate sizes of Qwen3 (0.6B, 8B) and SmolLM2, and odd ones.
GATE_UP_SHAPES: dict[str, Any] = {
    "small": [(1, 1), (3, 96), (0, 64), (7, 33), (2, 1536), (1, 17000)],
    "decode": [(1, 3072), (64, 3072), (256, 3072), (256, 12288)],
    "large": [(8192, 3072), (8192, 12288)],
}


@op(
    arguments={"gate_up": "[..., 2*n]"},
    inputs=Inputs(gate_up_inputs, **GATE_UP_SHAPES),
    cost=gate_up_cost,
    cancels=True,
)
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the two halves of the last dimension.

    Source: Shazeer, "GLU variants improve transformer", 2020.

    Args:
        gate_up: [..., 2 * intermediate_size], any float dtype.

    Returns:
        [..., intermediate_size], same dtype. SiLU is rounded to that dtype before the product, as in transformers.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@op(
    arguments={"gate_up": "[..., 2*n]"},
    inputs=Inputs(gate_up_inputs, **GATE_UP_SHAPES, variants=[{"approximate": "none"}, {"approximate": "tanh"}]),
    cost=gate_up_cost,
    cancels=True,
)
def gelu_and_mul(gate_up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) * up, where gate and up are the two halves of the last dimension (Shazeer, "GLU variants", 2020).

    Args:
        gate_up: [..., 2 * intermediate_size], any float dtype.
        approximate: "none" or "tanh", as in `fused_add_gelu`.

    Returns:
        [..., intermediate_size], same dtype. The GELU is rounded to that dtype before the product.

    Raises:
        ValueError: another `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up
