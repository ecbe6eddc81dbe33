"""The op `moe_experts_fp8`: as `experts`, with weights that are decoded in registers for the tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.op.registry import all_ops
from nanovllm.kernels.ops.moe_experts_fp8 import check_scales
from nanovllm.kernels.triton.device_math import gated_product, to_dtype
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm.packed_decode import decode_fp8, split_columns
from nanovllm.kernels.triton.gemm.tiles import dot, weight_rows
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of
from nanovllm.kernels.triton.moe.experts import by_pair, weighted_sum
from nanovllm.kernels.triton.moe.plan import BlockPlan, plan_fp8_blocks, plan_pairs
from nanovllm.kernels.triton.moe.sort import SortedPairs, sort_pairs

reference = all_ops()["moe_experts_fp8"].native
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["max_blocks"])
def fp8_block_kernel(
    x,  # rows of int32 words of two numbers, `stride_x` words apart; as in `block_kernel`
    weight,  # int16 words of two e4m3 [num_experts, num_rows (GATED: 2 * num_rows), words]
    scale,  # float32 [num_experts, ...], one for each block of 128 x 128
    order, blocks, max_blocks, y, num_rows, words, stride_x, stride_expert, stride_row, scale_expert, scale_row,
    DTYPE: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `block_kernel`. A tile has the 128 columns of one block, whose sum is multiplied by the scale."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(1)
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, TOKENS)
    live = place < tl.load(blocks + 2 * max_blocks + block)
    pair = tl.load(order + place, live, other=0)
    UNITS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = tl.program_id(0) * UNITS
    row, row_live = weight_rows(first, num_rows, ROWS, GATED)
    w_rows = weight + (expert.to(tl.int64) * stride_expert + row.to(tl.int64) * stride_row)[:, None]
    x_rows = x + ((pair // TOP_K if GATED else place).to(tl.int64) * stride_x)[None, :]
    s_row = scale + (expert * scale_expert + row // 128 * scale_row)
    cols = tl.arange(0, 64)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, words, 64, num_stages=STAGES):
        k = start + cols
        inside = k < words
        if MASK_K:
            w = tl.load(w_rows + k[None, :], row_live[:, None] & inside[None, :], other=0)
            xs = tl.load(x_rows + k[:, None], live[None, :] & inside[:, None], other=0)
        else:
            w = tl.load(w_rows + k[None, :], row_live[:, None], other=0)
            xs = tl.load(x_rows + k[:, None], live[None, :], other=0)
        s = tl.load(s_row + start // 64, row_live, other=0.0)
        w_tiles = decode_fp8(w, DTYPE)
        x_tiles = split_columns(xs, 2, DTYPE)
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(2):
            part = dot(w_tiles[i], x_tiles[i], part, "ieee")
        acc += part * s[:, None]
    acc = tl.trans(acc)
    col = first + tl.arange(0, UNITS)
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [TOKENS, UNITS, 2]))
        acc = gated_product(gate, up, "silu", DTYPE)
    target = y + (place if GATED else pair).to(tl.int64)[:, None] * num_rows + col[None, :]
    tl.store(target, to_dtype(acc, DTYPE), live[:, None] & (col < num_rows)[None, :])


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
    if x.dtype not in _DTYPES or hidden % 32:
        return reference(x, gate_up, gate_up_scale, down, down_scale, weights, experts)
    x, _, stride = matrix_of(x)
    if stride % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    weights, experts = weights.contiguous(), experts.contiguous()
    gate_up, down = _aligned(gate_up), _aligned(down)
    gate_up_scale, down_scale = adjacent(gate_up_scale), adjacent(down_scale)
    pairs = plan_pairs(num_tokens, top_k, num_experts, intermediate, hidden, 1)
    if pairs is not None:
        first, second = (gate_up.view(torch.int8), gate_up_scale), (down.view(torch.int8), down_scale)
        return by_pair(x, first, second, weights, experts, pairs)
    plan = plan_fp8_blocks(experts.numel(), num_experts)
    in_order = sort_pairs(experts, num_experts, plan.tokens)
    inner = _by_block(x, gate_up, gate_up_scale, in_order, top_k, True, plan)
    return weighted_sum(_by_block(inner, down, down_scale, in_order, top_k, False, plan), weights)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight with rows of whole 16-byte loads; copied if it has others."""
    fits = weight.stride(2) == 1 and weight.stride(1) % 16 == 0 and weight.stride(0) % 16 == 0
    return weight if fits and weight.data_ptr() % 16 == 0 else weight.clone(memory_format=torch.contiguous_format)


def _by_block(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, pairs: SortedPairs, top_k: int, gated: bool,
    plan: BlockPlan,
) -> torch.Tensor:  # fmt: skip
    """The product of each pair with its expert's weight: [pairs, outputs], as in `block_kernel`."""
    num_rows, words = weight.shape[1] // (2 if gated else 1), weight.shape[2] // 2
    y = torch.empty((len(pairs.order), num_rows), dtype=x.dtype, device=x.device)
    units, max_blocks = plan.rows // (2 if gated else 1), pairs.blocks.shape[1]
    in_words, weight_words, pdl = x.view(torch.int32), weight.view(torch.int16), has_dependent_launch(x.device)
    fp8_block_kernel[(cdiv(num_rows, units), max_blocks)](
        in_words, weight_words, scale, pairs.order, pairs.blocks, max_blocks, y, num_rows, words, in_words.stride(0),
        weight_words.stride(0), weight_words.stride(1), scale.stride(0), scale.stride(1), _DTYPES[x.dtype], top_k,
        gated, plan.tokens, plan.rows, num_rows % units != 0, words % 64 != 0, plan.stages, pdl,
        num_warps=plan.warps, num_stages=plan.stages, launch_pdl=pdl,
    )  # fmt: skip
    return y
