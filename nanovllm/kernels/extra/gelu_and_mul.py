"""The gated activation of Gemma-like models."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Inputs
from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.activation import GATE_UP_SHAPES, gate_up_cost, gate_up_inputs


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
