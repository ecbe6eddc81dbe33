"""The op `moe_experts` with weights that are stored in 8-bit floats (e4m3), as Qwen publishes them."""

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs
from nanovllm.kernels.ops.checks import values_checked
from nanovllm.kernels.ops.linear_fp8 import BLOCK, dequantise_fp8
from nanovllm.kernels.ops.moe_experts import check_experts, expert_needs, experts_cost, routed, sum_of_experts


def _inputs(t, tokens, experts, top_k, intermediate, hidden, skewed=0):
    def matrices(rows, columns):
        # Standard deviation 64, so that the largest numbers, 448, occur.
        weight = t.normal(experts, rows, columns, dtype=torch.float32, scale=64.0).clamp_(-448, 448)
        scale = t.uniform(experts, -(-rows // BLOCK), -(-columns // BLOCK), low=0.5, high=1.5, dtype=torch.float32)
        parameters = weight.to(torch.float8_e4m3fn), scale * (columns**-0.5 / 64)
        return [torch.nn.Parameter(p, requires_grad=False) for p in parameters]

    x = t.normal(tokens, hidden)
    (gate_up, gate_up_scale), (down, down_scale) = matrices(2 * intermediate, hidden), matrices(hidden, intermediate)
    weights, chosen = routed(t, tokens, experts, top_k, skewed)
    return {
        "x": x, "gate_up": gate_up, "gate_up_scale": gate_up_scale, "down": down, "down_scale": down_scale,
        "weights": weights, "experts": chosen,
    }  # fmt: skip


def _needs(numbers):
    if numbers["intermediate"] % BLOCK:
        return f"INTERMEDIATE of a multiple of {BLOCK}, not {numbers['intermediate']}"
    return expert_needs(numbers)


def _cost(x, gate_up, gate_up_scale, down, down_scale, weights, experts):
    return experts_cost(x, weights, experts, down, down_scale, gate_up, gate_up_scale)


@op(
    arguments={
        "x": "[tokens, hidden]", "gate_up": "float8_e4m3fn[num_experts, 2*intermediate, hidden]",
        "gate_up_scale": "float32[num_experts, gate_up_blocks, hidden_blocks]",
        "down": "float8_e4m3fn[num_experts, hidden, intermediate]",
        "down_scale": "float32[num_experts, hidden_blocks, intermediate_blocks]",
        "weights": "float32[tokens, top_k]", "experts": "int32[tokens, top_k]",
    },
    inputs=Inputs(
        _inputs,
        needs=_needs,
        small=[
            (1, 4, 2, 128, 64), (3, 6, 3, 256, 32), (0, 4, 2, 128, 32), (2, 32, 2, 128, 160), (19, 3, 2, 128, 64),
            (20, 4, 1, 128, 32, 1),
        ],
        # Qwen3-30B-A3B.
        decode=[(1, 128, 8, 768, 2048), (8, 128, 8, 768, 2048), (32, 128, 8, 768, 2048), (128, 128, 8, 768, 2048)],
        large=[(8191, 128, 8, 768, 2048)],
        scales=(1.0, 10.0),
    ),
    cost=_cost,
    cancels=True,
    # As `moe_experts`; the reference also rounds the dequantised weights.
    tolerance={torch.float16: 4e-3, torch.float32: 2e-5, torch.bfloat16: 3.2e-2},
    fake=lambda x, *args, **kwargs: x.new_empty(x.shape),
)  # fmt: skip
def moe_experts_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """`moe_experts` of weights in 8-bit floats, with a scale for each block of 128 x 128.

    Args:
        x: [tokens, hidden], any float dtype. It is not quantised.
        gate_up: float8_e4m3fn [num_experts, 2 * intermediate, hidden], intermediate a multiple of 128.
        gate_up_scale: float32 [num_experts, 2 * intermediate / 128, hidden / 128], rounded up.
        down: float8_e4m3fn [num_experts, hidden, intermediate].
        down_scale: float32 [num_experts, hidden / 128, intermediate / 128], rounded up.
        weights: [tokens, top_k] float32, finite.
        experts: [tokens, top_k] int32, from 0 to num_experts - 1.

    Returns:
        [tokens, hidden], x's dtype. The sum is in float32, and rounded once. The same arguments give the same bits.

    Raises:
        ValueError: scales of another shape, or an expert that does not exist (see `moe_experts`).
    """
    check_scales(gate_up, gate_up_scale, down, down_scale)
    if values_checked(experts.device):
        check_experts(experts, gate_up.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)

    def matrices(e: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = (gate_up[e], gate_up_scale[e]), (down[e], down_scale[e])
        first, second = (dequantise_fp8(weight, scale, wide).to(x.dtype) for weight, scale in both)
        return first, second

    return sum_of_experts(x, weights, experts, gate_up.shape[0], matrices)


def check_scales(
    gate_up: torch.Tensor, gate_up_scale: torch.Tensor, down: torch.Tensor, down_scale: torch.Tensor
) -> None:
    """Raise a ValueError that names the first scales that are not those of blocks of 128 x 128."""
    if down.shape[2] % BLOCK:
        raise ValueError(f"moe_experts_fp8: down: expected a multiple of {BLOCK} columns, not {down.shape[2]}")
    for name, weight, scale in (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale)):
        expected = (weight.shape[0], *(-(-n // BLOCK) for n in weight.shape[1:]))
        if scale.shape != expected:
            raise ValueError(
                f"moe_experts_fp8: {name}_scale: expected {list(expected)} for {name} {list(weight.shape)}, not"
                f" {list(scale.shape)}"
            )
