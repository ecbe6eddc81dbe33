"""The first half of a gated MLP."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.declaration import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.activation import silu_and_mul


def _inputs(t, tokens, outputs, size):
    # Weights that keep the variance of what they are applied to, as trained ones about do.
    return {"x": t.normal(tokens, size), "weight": t.parameter(2 * outputs, size, scale=size**-0.5)}


def _cost(x, weight):
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(nbytes(x, weight) + rows * weight.shape[0] // 2 * x.element_size(), 2 * rows * weight.numel())


@op(
    arguments={"x": "[..., size]", "weight": "[2*outputs, size]"},
    inputs=Inputs(
        _inputs,
        needs=at_least_one("size"),
        # (tokens, outputs, size): no power of two, several tiles, no token.
        small=[(1, 2, 1), (2, 40, 64), (3, 37, 1000), (5, 24, 2112), (0, 8, 16), (9, 72, 320), (33, 136, 192)],
        # Qwen3 0.6B and 8B.
        decode=[(8, 3072, 1024), (32, 3072, 1024), (64, 3072, 1024), (8, 12288, 4096), (32, 12288, 4096)],
        # A prompt's worth, of a number that fills no tile: Qwen3 0.6B and 1.7B.
        large=[(8191, 3072, 1024), (4099, 6144, 2048)],
        scales=(1.0, 50.0),
    ),
    cost=_cost,
    cancels=True,
    # The reference itself rounds gate, up, SiLU and the product, each in its turn.
    tolerance={torch.float16: 4e-3, torch.bfloat16: 3.2e-2},
    fuses=("linear", "silu_and_mul"),
)
def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T): a gated MLP up to its down projection (Shazeer, "GLU variants improve transformer", 2020).

    Args:
        x: [..., size]; weight: [2 * outputs, size], the rows of the gate, then those of the up projection; one dtype.

    Returns:
        [..., outputs], same dtype. Gate, up, SiLU and the product are each rounded, as the ops that it is made of
        round.
    """
    return silu_and_mul.native(F.linear(x, weight))
