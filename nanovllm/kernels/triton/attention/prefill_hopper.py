"""Prefill attention for Hopper: what its kernel takes, and the launch. The kernel is in `prefill_hopper_kernel.py`."""

from __future__ import annotations

import torch

from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.triton.attention.launch_helpers import (
    LOG2E,
    gluon_kernel,
    has_hopper_kernels,
    num_multiprocessors,
)
from nanovllm.kernels.triton.attention.prefill_plan import HopperPrefillPlan, fit_hopper, prefill_registers
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.launch_arguments import next_power_of_2


def takes(q: torch.Tensor, kv: PagedKV) -> bool:
    """Whether the kernel can read these: no scales, and for the copy engine 16-byte steps, and the cache as rows of
    slots.
    """
    k_cache = kv.k_cache
    if kv.k_scale is not None or kv.v_scale is not None or not has_hopper_kernels(q.device):
        return False
    if q.dtype not in (torch.float16, torch.bfloat16) or k_cache.dtype != q.dtype:
        return False
    q_strides, strides = q.stride(), k_cache.stride()
    if strides[0] != kv.block_size * strides[1]:
        return False
    steps = q_strides[0] | q_strides[1] | strides[1] | strides[2]
    addresses = q.data_ptr() | k_cache.data_ptr() | kv.v_cache.data_ptr()
    return steps % 8 == 0 and addresses % 16 == 0


def launch_hopper_prefill(
    plan: HopperPrefillPlan,
    out: torch.Tensor,
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """The launch for what it `takes`."""
    num_tokens, num_heads, head_dim = q.shape
    num_slots = kv.k_cache.shape[0] * kv.block_size
    dim_pad = max(64, next_power_of_2(head_dim))
    kernel, descriptor = gluon_kernel("prefill_hopper_kernel")
    query_buffers, wide = fit_hopper(plan, dim_pad)
    queries = descriptor(q.data_ptr(), q.dtype, q.shape, q.stride(), (64 // plan.pack, plan.pack, dim_pad))
    slots, box = (num_slots, kv.num_kv_heads, head_dim), (min(kv.block_size, plan.tile), 1, 64)
    keys, values = (
        descriptor(cache.data_ptr(), q.dtype, slots, cache.stride()[1:], box) for cache in (kv.k_cache, kv.v_cache)
    )
    # Sequence s may need a tile more than its share of the tokens.
    items_per_head = num_tokens // (128 // plan.pack) + kv.num_seqs
    num_items = items_per_head * (num_heads // plan.pack)
    programs = min(num_items, plan.programs or num_multiprocessors(q.device))
    consumer, producer = prefill_registers(dim_pad)
    kernel[(programs,)](
        out, queries, keys, values, kv.block_table, cu_seqlens_q, kv.context_lens, arrival_counters(q.device, 2),
        kv.num_seqs, kv.block_table.stride(0), items_per_head, num_items, scale * LOG2E, HEADS=num_heads,
        PACK=plan.pack, GROUP=num_heads // kv.num_kv_heads, HEAD_DIM=head_dim, DIM_PAD=dim_pad,
        BLOCK_SIZE=kv.block_size, TILE=plan.tile, STAGES=plan.stages, QUERIES=query_buffers, SOFT_CAP=soft_cap or 0.0,
        WINDOW=window or 0, WIDE=wide, CONSUMER_REGISTERS=consumer, PRODUCER_REGISTERS=producer, num_warps=4,
        maxnreg=168,
    )  # fmt: skip
