"""Prefill attention over the paged KV cache: the wrapper, and the choice of tile sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.triton_attention.common import LOG2E, has_tma, padded_count, shared_memory
from nanovllm.kernels.triton_attention.prefill_kernel import prefill_kernel


@dataclass(frozen=True)
class PrefillPlan:
    rows: int
    """Query rows of a program: tokens times the query heads of one KV head."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int
    tma: bool = False
    """Load keys and values with the tensor memory accelerator."""


@functools.cache
def plan_prefill(
    group: int, head_dim: int, itemsize: int, block_size: int, max_query_len: int, tma: bool, shared_memory: int
) -> PrefillPlan:
    """Measured on an H200 with bf16 and head_dim 128.

    Args:
        tma: whether the machine and the layout of the cache allow it.
        shared_memory: bytes that a program may have.
    """
    dim_pad = triton.next_power_of_2(head_dim)
    if itemsize == 4:  # no tensor cores: small tiles and many threads, or registers spill
        return PrefillPlan(rows=32, tile=16, warps=8, stages=2)
    # TMA reads rectangles: whole rows of one block, and no padding of a row that would reach into the next head.
    tma = tma and dim_pad == head_dim
    if dim_pad > 128:
        plan = PrefillPlan(rows=64, tile=min(32, block_size), warps=4, stages=2, tma=tma)
    elif max_query_len >= 8192 and tma and block_size >= 128 and 128 % group == 0 and shared_memory > 230_000:
        plan = PrefillPlan(rows=128, tile=128, warps=8, stages=3, tma=tma)
    else:
        plan = PrefillPlan(rows=64, tile=64, warps=4, stages=3 if shared_memory > 150_000 else 2, tma=tma)
    if max_query_len * group <= 16:
        plan = replace(plan, rows=16)
    if group > 64:
        plan = replace(plan, rows=triton.next_power_of_2(group), warps=8)
    return replace(plan, tma=plan.tma and plan.tile <= block_size)


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """Runs of query tokens, each causal over its own sequence: see `ops.attention.attention_prefill`.

    Args:
        cu_seqlens_q: [num_seqs + 1] int32, on the device: where each sequence's run starts in q, and the end of the last.
        context_lens: [num_seqs] int32, on the device: tokens of each sequence up to its last query.
        max_query_len: the longest run, or a bound; tile sizes follow from it.
        soft_cap: if not 0, scores become soft_cap * tanh(scores / soft_cap).
        window: if not 0, a query sees only the last `window` tokens up to its own.
        plan: instead of the one that `plan_prefill` picks.

    Returns:
        [sum of the runs, num_heads, head_dim], the dtype of q. Cache slots beyond context_lens never influence it, NaN or
        not. The same inputs give the same bits, and so does a sequence whatever is beside it.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    num_seqs = context_lens.shape[0]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and q.stride(2) == 1
    assert block_table.stride(1) == 1 and context_lens.is_contiguous() and cu_seqlens_q.is_contiguous()
    if plan is None:
        tma = has_tma(q.device) and k_cache.is_contiguous() and v_cache.is_contiguous()
        plan = plan_prefill(group, head_dim, q.element_size(), block_size, max_query_len, tma, shared_memory(q.device))
    rows = max(plan.rows, triton.next_power_of_2(group))
    descriptors = [None, None]
    if plan.tma:
        shape, strides = [num_blocks * block_size, num_kv_heads * head_dim], [num_kv_heads * head_dim, 1]
        descriptors = [TensorDescriptor(c, shape, strides, [plan.tile, head_dim]) for c in (k_cache, v_cache)]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    prefill_kernel[num_tokens // (rows // group) + num_seqs, num_kv_heads](
        out,
        q,
        k_cache,
        v_cache,
        *descriptors,
        block_table,
        cu_seqlens_q,
        context_lens,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        scale * LOG2E,
        SEQS_PAD=padded_count(num_seqs),
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        SOFT_CAP=soft_cap,
        WINDOW=window,
        STAGES=plan.stages,
        TMA=plan.tma,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    return out
