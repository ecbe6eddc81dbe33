"""Gated activations."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.registry import op


@op
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the two halves of the last dimension.

    Args:
        gate_up: [..., 2 * intermediate_size], any float dtype.

    Returns:
        [..., intermediate_size], same dtype. SiLU is rounded to that dtype before the product, as in transformers.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
