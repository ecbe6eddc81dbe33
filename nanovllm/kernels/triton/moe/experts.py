"""The ops `moe_experts` and `moe_experts_fp8`: two kernels for few tokens; else pairs are sorted by expert, and each
expert is read once. With many pairs an expert, Hopper has kernels of its own (`hopper_experts`).

The intermediate values of the second way are those of all pairs, in the order of their experts. No value is added to
memory: a token's experts are summed in the order of its choices.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.op.registry import all_ops
from nanovllm.kernels.ops.moe_experts_fp8 import check_scales
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm.packed_products import SIXTEEN
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, next_power_of_2
from nanovllm.kernels.triton.moe import hopper_experts
from nanovllm.kernels.triton.moe.expert_kernels import (
    block_kernel,
    fp8_block_kernel,
    pair_down_kernel,
    pair_gate_up_kernel,
    sum_kernel,
)
from nanovllm.kernels.triton.moe.expert_plan import ExpertPlan, PairPlan, plan_blocks, plan_fp8_blocks, plan_pairs
from nanovllm.kernels.triton.moe.sort import SortedPairs, sort_pairs

reference = all_ops()["moe_experts_fp8"].native
_SUM_BLOCK = 512
Scaled = tuple[torch.Tensor, "torch.Tensor | None"]
"""(weight, its scales or None)"""


def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The op `moe_experts`."""
    num_tokens, top_k = experts.shape
    num_experts, hidden, intermediate = down.shape
    if not num_tokens:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, _, _ = matrix_of(x)
    weights, experts = weights.contiguous(), experts.contiguous()
    gate_up, down = adjacent(gate_up), adjacent(down)
    return _run(x, (gate_up, None), (down, None), weights, experts)


def moe_experts_fp8(
    x: torch.Tensor, gate_up: torch.Tensor, gate_up_scale: torch.Tensor, down: torch.Tensor, down_scale: torch.Tensor,
    weights: torch.Tensor, experts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The op `moe_experts_fp8`. float32, and rows that loads cannot read wide, are left to the reference."""
    check_scales(gate_up, gate_up_scale, down, down_scale)
    num_tokens, top_k = experts.shape
    num_experts, hidden, intermediate = down.shape
    if not num_tokens:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dtype not in SIXTEEN or hidden % 32:
        return reference(x, gate_up, gate_up_scale, down, down_scale, weights, experts)
    x, _, stride = matrix_of(x)
    if stride % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    weights, experts = weights.contiguous(), experts.contiguous()
    gate_up, down = _aligned(gate_up), _aligned(down)
    gate_up_scale, down_scale = adjacent(gate_up_scale), adjacent(down_scale)
    return _run(x, (gate_up, gate_up_scale), (down, down_scale), weights, experts)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight with rows of whole 16-byte loads; copied if it has others."""
    fits = weight.stride(2) == 1 and weight.stride(1) % 16 == 0 and weight.stride(0) % 16 == 0
    return weight if fits and weight.data_ptr() % 16 == 0 else weight.clone(memory_format=torch.contiguous_format)


def _run(x: torch.Tensor, gate_up: Scaled, down: Scaled, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, hidden], a matrix, through its experts. Weights with scales are 8-bit floats."""
    num_tokens, top_k = experts.shape
    num_experts, hidden, intermediate = down[0].shape
    fp8 = down[1] is not None
    pairs = plan_pairs(num_tokens, top_k, num_experts, intermediate, hidden, 1 if fp8 else x.element_size())
    if pairs is not None:
        return _by_pair(x, gate_up, down, weights, experts, pairs)
    count = experts.numel()
    many = None if fp8 else hopper_experts.plan_for(x, gate_up[0], down[0], count)
    if many is not None:
        in_order = sort_pairs(experts, num_experts, many.tokens)
        inner = hopper_experts.hopper_experts(x, gate_up[0], in_order, top_k, True, many)
        return _weighted_sum(hopper_experts.hopper_experts(inner, down[0], in_order, top_k, False, many), weights)
    plan = plan_fp8_blocks(count, num_experts) if fp8 else plan_blocks(count, num_experts, x.element_size())
    in_order = sort_pairs(experts, num_experts, plan.tokens)
    inner = _by_block(x, gate_up, in_order, top_k, True, plan)
    return _weighted_sum(_by_block(inner, down, in_order, top_k, False, plan), weights)


def _strides(scale: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if scale is None else (scale.stride(0), scale.stride(1))


def _weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs [num_tokens * top_k, hidden], weights [num_tokens, top_k] -> [num_tokens, hidden]."""
    (num_tokens, top_k), hidden = weights.shape, outputs.shape[1]
    y = torch.empty((num_tokens, hidden), dtype=outputs.dtype, device=outputs.device)
    block, pdl = min(_SUM_BLOCK, next_power_of_2(hidden)), has_dependent_launch(outputs.device)
    sum_kernel[(cdiv(hidden, block), num_tokens)](
        outputs, weights, y, hidden, top_k, block, pdl, num_warps=max(1, block // 256), launch_pdl=pdl
    )
    return y


def _by_pair(
    x: torch.Tensor, of_gate_up: Scaled, of_down: Scaled, weights: torch.Tensor, experts: torch.Tensor, plan: PairPlan
) -> torch.Tensor:
    """Each pair reads its expert, in two kernels. Weights with scales are 8-bit floats, as int8."""
    (gate_up, gate_up_scale), (down, down_scale) = of_gate_up, of_down
    if down_scale is not None:
        gate_up, down = gate_up.view(torch.int8), down.view(torch.int8)
    num_tokens, top_k = experts.shape
    num_experts, hidden, intermediate = down.shape
    inner = torch.empty((experts.numel(), intermediate), dtype=x.dtype, device=x.device)
    y = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    lane, pdl = 16 // gate_up.element_size(), has_dependent_launch(x.device)
    pair_gate_up_kernel[(cdiv(intermediate, plan.rows), experts.numel())](
        x, gate_up, gate_up_scale, experts, inner, intermediate, num_experts, x.stride(0), gate_up.stride(0),
        gate_up.stride(1), *_strides(gate_up_scale), top_k, hidden, plan.rows, plan.block, lane, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    pair_down_kernel[(cdiv(hidden, plan.down_rows), num_tokens)](
        inner, down, down_scale, weights, experts, y, hidden, num_experts, down.stride(0), down.stride(1),
        *_strides(down_scale),
        top_k, next_power_of_2(top_k), intermediate, plan.down_rows, plan.down_block, lane, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return y


def _by_block(
    x: torch.Tensor, of_weight: Scaled, pairs: SortedPairs, top_k: int, gated: bool, plan: ExpertPlan
) -> torch.Tensor:
    """The product of each pair with its expert's weight: [pairs, outputs], as in `block_kernel`."""
    weight, scale = of_weight
    num_rows, size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    y = torch.empty((len(pairs.order), num_rows), dtype=x.dtype, device=x.device)
    units, max_blocks = plan.rows // (2 if gated else 1), pairs.blocks.shape[1]
    grid, masked, pdl = (cdiv(num_rows, units), max_blocks), num_rows % units != 0, has_dependent_launch(x.device)
    options = dict(num_warps=plan.warps, num_stages=plan.stages, launch_pdl=pdl)
    if scale is not None:
        x, weight, words = x.view(torch.int32), weight.view(torch.int16), size // 2
        fp8_block_kernel[grid](
            x, weight, scale, pairs.order, pairs.blocks, max_blocks, y, num_rows, words, x.stride(0), weight.stride(0),
            weight.stride(1), scale.stride(0), scale.stride(1), SIXTEEN[y.dtype], top_k, gated, plan.tokens, plan.rows,
            masked, words % 64 != 0, plan.stages, pdl, **options,
        )  # fmt: skip
        return y
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    block_kernel[grid](
        x, weight, pairs.order, pairs.blocks, max_blocks, y, num_rows, size, x.stride(0), weight.stride(0),
        weight.stride(1), top_k, gated, plan.tokens, plan.rows, plan.block_k, masked, size % plan.block_k != 0,
        plan.stages, precision, pdl, **options,
    )  # fmt: skip
    return y
