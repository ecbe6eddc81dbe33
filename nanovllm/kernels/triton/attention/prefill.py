"""Prefill attention over the paged KV cache: the provider, the choice of kernel, and the launch of the kernel for
any GPU.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.ops.checks import check_prefill
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.attention import prefill_hopper
from nanovllm.kernels.triton.attention.launch_helpers import LOG2E, capability, padded_count, result_for
from nanovllm.kernels.triton.attention.prefill_kernel import prefill_kernel
from nanovllm.kernels.triton.attention.prefill_plan import (
    HopperPrefillPlan,
    PrefillPlan,
    plan_hopper_prefill,
    plan_prefill,
)
from nanovllm.kernels.triton.launch_arguments import next_power_of_2
from nanovllm.kernels.triton.rows.move_rows import num_scales


def attention_prefill(
    q: torch.Tensor, kv: PagedKV, cu_seqlens_q: torch.Tensor, max_query_len: int, scale: float,
    window: int | None = None, soft_cap: float | None = None, *, plan: PrefillPlan | HopperPrefillPlan | None = None,
    concurrent: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `attention_prefill`.

    Args:
        plan: instead of the one that `plan_prefill` or `plan_hopper_prefill` picks. A `HopperPrefillPlan` needs a
            Hopper GPU, queries and cache of the same 16-bit dtype, blocks of a power of two of at least 8 tokens,
            strides of whole 16 bytes, and no scales.
        concurrent: other kernels run at the same time. The kernel for Hopper GPUs leaves them no room, so it is not
            used.
        out: contiguous, as q: takes the result, and is returned.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of q. The same inputs give the same bits. A sequence's bits do not
        depend on the other sequences, but they do on max_query_len and `concurrent`, from which kernel and tiles
        follow.

    A sequence's keys are not split between programs: few queries with a long context occupy few multiprocessors.
    """
    check_prefill(q, kv, cu_seqlens_q, max_query_len, scale, window, soft_cap)
    out = result_for(q, out)
    if q.shape[0] == 0 or kv.num_seqs == 0:
        return out
    if q.stride(2) != 1:
        q = q.contiguous()
    plan = plan or _plan(q, kv, max_query_len, concurrent)
    arguments = out, q, kv, cu_seqlens_q, scale, window, soft_cap
    if isinstance(plan, HopperPrefillPlan):
        prefill_hopper.launch_hopper_prefill(plan, *arguments)
    else:
        _launch_anywhere(plan, *arguments)
    return out


def _plan(q: torch.Tensor, kv: PagedKV, max_query_len: int, concurrent: bool) -> PrefillPlan | HopperPrefillPlan:
    """The tuned plan, or where there is none the built-in one."""
    group, head_dim = q.shape[1] // kv.num_kv_heads, q.shape[2]
    shape = group, head_dim, q.dtype, kv.k_cache.dtype, kv.block_size
    # Few query rows do not fill the tiles of the kernel for Hopper, and one consumer would idle.
    if max_query_len * (group & -group) > 32 and not concurrent and prefill_hopper.takes(q, kv):
        hopper = plan_hopper_prefill(group, head_dim, kv.block_size)
        if hopper is not None:
            return tunables.ATTENTION_PREFILL_HOPPER.find(q.device, *shape) or hopper
    rows = max_query_len * group
    few_rows = max(16, bucket(rows)) if rows <= 64 and q.element_size() == 2 else 0
    # Plans are tuned with the GPU to themselves.
    tuned = None if concurrent else tunables.ATTENTION_PREFILL.find(q.device, *shape, few_rows)
    itemsizes = q.element_size(), max_query_len, kv.k_cache.element_size()
    return tuned or plan_prefill(group, head_dim, *itemsizes, capability(q.device), concurrent)


def _launch_anywhere(
    plan: PrefillPlan,
    out: torch.Tensor,
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv.num_kv_heads
    rows = max(plan.rows, next_power_of_2(group))
    fp8 = kv.k_cache.element_size() == 1
    prefill_kernel[kv.num_kv_heads, num_tokens // (rows // group) + kv.num_seqs](
        out, q, *(cache.view(torch.int8) if fp8 else cache for cache in (kv.k_cache, kv.v_cache)), kv.block_table,
        cu_seqlens_q, kv.context_lens, kv.k_scale, kv.v_scale, kv.num_seqs, *q.stride()[:2], *kv.k_cache.stride()[:3],
        kv.block_table.stride(0), scale * LOG2E, SEQS_PAD=padded_count(kv.num_seqs), GROUP=group, ROWS=rows,
        HEAD_DIM=head_dim, DIM_PAD=next_power_of_2(head_dim), BLOCK_SIZE=kv.block_size, TILE=plan.tile,
        SOFT_CAP=soft_cap or 0.0, WINDOW=window or 0, FP8=fp8, K_SCALES=num_scales(kv.k_scale),
        V_SCALES=num_scales(kv.v_scale), STAGES=plan.stages, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
