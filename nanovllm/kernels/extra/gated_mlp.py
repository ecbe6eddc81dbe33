"""The feed-forward block of a decoder layer."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.extra.linear_bias_act import ACTIVATIONS, check_activation
from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, at_least_one, nbytes

GATES = ("silu", "gelu", "gelu_tanh")


def _inputs(t, m, hidden, intermediate):
    return {
        "x": t.normal(m, hidden),
        "gate_up": t.parameter(2 * intermediate, hidden, scale=hidden**-0.5),
        "down": t.parameter(hidden, intermediate, scale=intermediate**-0.5),
    }


@op(
    arguments={"x": "[..., h]", "gate_up": "[2*i, h]", "down": "[h, i]"},
    inputs=Inputs(
        _inputs,
        needs=at_least_one("hidden", "intermediate"),
        small=[(1, 64, 48), (5, 33, 70), (0, 64, 48), (17, 128, 96), (70, 40, 130)],
        # Qwen3-0.6B and Qwen3-8B.
        decode=[(1, 1024, 3072), (16, 1024, 3072), (256, 1024, 3072), (1, 4096, 12288)],
        large=[(8192, 1024, 3072), (2048, 4096, 12288)],
        variants=[{"activation": name} for name in GATES],
        scales=(1.0, 1e-2, 10.0),
    ),
    cost=lambda x, gate_up, down, activation="silu": Cost(nbytes(x, gate_up, down, x), 6 * x.numel() * down.shape[1]),
    # Gate, up, activation, product and sum are each rounded by the reference.
    tolerance={torch.float16: 4e-3, torch.float32: 2e-5, torch.bfloat16: 3e-2},
)
def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """(activation(x @ gate^T) * (x @ up^T)) @ down^T (Shazeer, "GLU variants improve transformer", 2020).

    Args:
        x: [..., hidden], any float dtype and strides.
        gate_up: [2 * intermediate, hidden], same dtype: the rows of the gate, then those of the up projection.
        down: [hidden, intermediate], same dtype.
        activation: "silu", "gelu" (with erf) or "gelu_tanh".

    Returns:
        [..., hidden], contiguous, same dtype. This reference rounds gate, up, the activation and the product to that
        dtype, each in its turn; a kernel that fuses them rounds the product only, which is then multiplied by `down`.

    Raises:
        ValueError: sizes, dtypes or devices that do not fit together, or another activation.
    """
    check_activation(activation, GATES)
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(ACTIVATIONS[activation](gate) * up, down)
