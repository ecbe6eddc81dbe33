"""Prefill attention over the paged KV cache: the wrapper, and the choice of kernel and tile sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.ops.checks import check_prefill, check_prefill_values, values_checked
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.attention.common import (
    LOG2E,
    capability,
    has_hopper_kernels,
    num_multiprocessors,
    padded_count,
    result_for,
)
from nanovllm.kernels.triton.attention.prefill_kernel import prefill_kernel
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.launch import next_power_of_2
from nanovllm.kernels.triton.rows.move_rows import num_scales


@dataclass(frozen=True)
class PrefillPlan:
    """For the kernel that runs anywhere."""

    rows: int
    """Query rows of a program: tokens times the query heads of one KV head."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperPlan:
    """For the kernel of Hopper GPUs."""

    pack: int
    """Query heads of one KV head that share a tile: a power of two that divides their number."""
    tile: int
    """KV tokens a step."""
    stages: int
    """Tiles of keys, and of values, in shared memory."""
    programs: int = 0
    """0: as many as there are multiprocessors."""


# Bytes of a program on Hopper, and more than that kernel needs beside queries, keys and values: barriers, and 2 KiB a consumer.
_SHARED_MEMORY, _SCRATCH = 227 << 10, 5 << 10


@functools.cache
def plan_prefill(
    group: int,
    head_dim: int,
    itemsize: int,
    max_query_len: int,
    cache_itemsize: int = 2,
    capability: int = 9,
    concurrent: bool = False,
) -> PrefillPlan:
    """capability: the first number of the GPU's. Before 9 both operands of a product are in registers, and larger tiles spill.

    concurrent: as for `attention_prefill`.
    """
    dim_pad = next_power_of_2(head_dim)
    if itemsize == 4:
        return PrefillPlan(rows=32, tile=16, warps=8, stages=2)
    if max_query_len * group <= 64:
        rows = max(16, next_power_of_2(max_query_len * group))
        return PrefillPlan(rows, tile=64, warps=4, stages=3 if dim_pad <= 128 else 2)
    if dim_pad > 128:  # or registers spill
        return PrefillPlan(rows=64, tile=32, warps=8 if cache_itemsize == 1 and capability < 9 else 4, stages=2)
    if capability < 9:
        return PrefillPlan(rows=128, tile=32, warps=8, stages=2)
    if concurrent:  # two find room on a multiprocessor
        return PrefillPlan(rows=64, tile=64, warps=4, stages=3)
    return PrefillPlan(rows=128, tile=128, warps=8, stages=2)


@functools.cache
def plan_hopper(group: int, head_dim: int, block_size: int) -> HopperPlan | None:
    """Measured on an H200 with bf16 and head_dim 128; None: a shape that the kernel does not take."""
    if head_dim > 256 or block_size < 8 or block_size & (block_size - 1):
        return None
    pack = min(group & -group, 64)  # the largest power of two that divides it
    if head_dim > 128:
        return HopperPlan(pack, tile=64, stages=2)
    return HopperPlan(pack, tile=128, stages=2 if head_dim > 64 else 4)


def fit_hopper(plan: HopperPlan, dim_pad: int) -> tuple[int, bool]:
    """(of how many work items queries fit into shared memory beside keys and values: 2, or else 1; whether there is room for
    what a wide store of the output needs)."""
    left = _SHARED_MEMORY - 2 * 2 * plan.stages * plan.tile * dim_pad
    queries = 2 if 2 * 2 * 128 * dim_pad + _SCRATCH <= left else 1
    return queries, 2 * queries * 128 * dim_pad + _SCRATCH <= left


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    plan: PrefillPlan | HopperPlan | None = None,
    concurrent: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs of query tokens, each causal over its own sequence: see `ops.attention.attention_prefill`.

    Args:
        plan: instead of the one that `plan_prefill` or `plan_hopper` picks. A `HopperPlan` needs a Hopper GPU, queries and
            cache of the same 16-bit dtype, blocks of a power of two of at least 8 tokens, strides of whole 16 bytes, and
            no scales.
        concurrent: other kernels run at the same time. The kernel of Hopper GPUs leaves them no room, so it is another one's.
        out: contiguous, as q: takes the result, and is returned.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of q. The same inputs give the same bits. A sequence's bits do not depend
        on what is beside it, but they do on max_query_len and `concurrent`, from which kernel and tiles follow.

    A sequence's keys are not split between programs: few queries with a long context occupy few multiprocessors.
    """
    check_prefill(
        q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, window, soft_cap, k_scale, v_scale, scale
    )
    if values_checked(q.device):
        check_prefill_values(q, k_cache, block_table, cu_seqlens_q, context_lens, max_query_len)
    num_tokens, num_heads, head_dim = q.shape
    out = result_for(q, out)
    if num_tokens == 0 or len(context_lens) == 0:
        return out
    if q.stride(2) != 1:
        q = q.contiguous()
    group = num_heads // k_cache.shape[2]
    if plan is None and not concurrent and k_scale is None and v_scale is None and _suits_hopper(q, k_cache, v_cache):
        # Few query rows do not fill the tiles of that kernel, and one consumer would idle.
        if max_query_len * (group & -group) > 32:
            plan = plan_hopper(group, head_dim, k_cache.shape[1])
            if plan is not None:
                key = group, head_dim, q.dtype, k_cache.dtype, k_cache.shape[1]
                plan = tunables.ATTENTION_PREFILL_HOPPER.find(q.device, *key) or plan
    if plan is None:
        rows = max_query_len * group
        few_rows = max(16, bucket(rows)) if rows <= 64 and q.element_size() == 2 else 0
        key = group, head_dim, q.dtype, k_cache.dtype, k_cache.shape[1], few_rows
        plan = None if concurrent else tunables.ATTENTION_PREFILL.find(q.device, *key)  # tuned alone on the GPU
        plan = plan or plan_prefill(
            group, head_dim, q.element_size(), max_query_len, k_cache.element_size(), capability(q.device), concurrent
        )
    launch = _launch_hopper if isinstance(plan, HopperPlan) else _launch_anywhere
    scales = () if isinstance(plan, HopperPlan) else (k_scale, v_scale)
    launch(plan, out, q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, scale, window, soft_cap, *scales)
    return out


def _suits_hopper(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the copy engine can read these: 16-byte steps, and the cache as rows of slots."""
    if not has_hopper_kernels(q.device) or q.dtype not in (torch.float16, torch.bfloat16) or k_cache.dtype != q.dtype:
        return False
    q_strides, strides = q.stride(), k_cache.stride()
    if strides[0] != k_cache.shape[1] * strides[1]:
        return False
    steps = q_strides[0] | q_strides[1] | strides[1] | strides[2]
    addresses = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    return steps % 8 == 0 and addresses % 16 == 0


@functools.cache
def _hopper() -> tuple[Any, Any]:
    """(the kernel, `descriptor`), imported where they can run: Gluon is not in every Triton."""
    from nanovllm.kernels.triton.attention.prefill_hopper import prefill_hopper_kernel
    from nanovllm.kernels.triton.gluon_compat import descriptor

    return prefill_hopper_kernel, descriptor


def _launch_hopper(
    plan, out, q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, scale, window, soft_cap
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    num_seqs = context_lens.shape[0]
    dim_pad = max(64, next_power_of_2(head_dim))
    kernel, descriptor = _hopper()
    query_buffers, wide = fit_hopper(plan, dim_pad)
    queries = descriptor(q.data_ptr(), q.dtype, q.shape, q.stride(), (64 // plan.pack, plan.pack, dim_pad))
    slots, strides = (num_blocks * block_size, num_kv_heads, head_dim), k_cache.stride()[1:]
    box = min(block_size, plan.tile), 1, 64
    keys = descriptor(k_cache.data_ptr(), k_cache.dtype, slots, strides, box)
    values = descriptor(v_cache.data_ptr(), v_cache.dtype, slots, strides, box)
    # Sequence s may need a tile more than its share of the tokens.
    items_per_head = num_tokens // (128 // plan.pack) + num_seqs
    num_items = items_per_head * (num_heads // plan.pack)
    programs = min(num_items, plan.programs or num_multiprocessors(q.device))
    consumer, producer = prefill_registers(dim_pad)
    kernel[(programs,)](
        out,
        queries,
        keys,
        values,
        block_table,
        cu_seqlens_q,
        context_lens,
        arrival_counters(q.device, 2),
        num_seqs,
        block_table.stride(0),
        items_per_head,
        num_items,
        scale * LOG2E,
        HEADS=num_heads,
        PACK=plan.pack,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        STAGES=plan.stages,
        QUERIES=query_buffers,
        SOFT_CAP=soft_cap or 0.0,
        WINDOW=window or 0,
        WIDE=wide,
        CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer,
        num_warps=4,
        maxnreg=168,
    )


def prefill_registers(dim_pad: int) -> tuple[int, int]:
    """Registers of a consumer's and of the producer's threads: 12 warps share 65536, 168 each, which move to where they are needed."""
    return (224, 56) if dim_pad <= 128 else (232, 40)


def _launch_anywhere(
    plan, out, q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, scale, window, soft_cap, k_scale, v_scale
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = context_lens.shape[0]
    block_size, num_kv_heads = k_cache.shape[1:3]
    strides = k_cache.stride()
    group = num_heads // num_kv_heads
    rows = max(plan.rows, next_power_of_2(group))
    fp8 = k_cache.element_size() == 1
    if fp8:
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    prefill_kernel[num_kv_heads, num_tokens // (rows // group) + num_seqs](
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        context_lens,
        k_scale,
        v_scale,
        num_seqs,
        q.stride(0),
        q.stride(1),
        *strides[:3],
        block_table.stride(0),
        scale * LOG2E,
        SEQS_PAD=padded_count(num_seqs),
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        DIM_PAD=next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        SOFT_CAP=soft_cap or 0.0,
        WINDOW=window or 0,
        FP8=fp8,
        K_SCALES=num_scales(k_scale),
        V_SCALES=num_scales(v_scale),
        STAGES=plan.stages,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
