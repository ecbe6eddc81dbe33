"""Decode attention for Hopper: what its kernel takes, and the launch. The kernel is in `decode_hopper_kernel.py`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.attention.common import (
    LOG2E,
    has_hopper_kernels,
    num_multiprocessors,
    padded_count,
    result_for,
)
from nanovllm.kernels.triton.attention.decode_plan import HopperDecodePlan, plan_hopper_decode
from nanovllm.kernels.triton.cluster_launch import launch_clusters, launches_clusters
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.early_start import ATTENTION_TOKENS
from nanovllm.kernels.triton.rows.move_rows import num_scales

if TYPE_CHECKING:
    from nanovllm.kernels.triton.attention.decode import NewTokens

MAX_SEQS = 512
"""Every warp finds its piece by itself: sixteen sequences a lane."""
_MAX_GROUP = 8  # the N of the tensor-core instruction


def unsuited(
    num_seqs: int, group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int
) -> str | None:
    """Why the kernel does not take such a call, or None: what shapes and dtypes alone say."""
    if dtype not in (torch.bfloat16, torch.float16) or cache_dtype not in (dtype, FP8):
        return f"q, k_cache: expected the same 16-bit dtype or {FP8} for the cache, got {dtype} and {cache_dtype}"
    if head_dim not in (64, 128):
        return f"q: expected head_dim 64 or 128, got {head_dim}"
    if group > _MAX_GROUP:
        return f"q: expected up to {_MAX_GROUP} query heads a KV head, got {group}"
    if block_size % 64:
        return f"k_cache: expected blocks of a multiple of 64 tokens, got {block_size}"
    if num_seqs > MAX_SEQS:
        return f"q: expected up to {MAX_SEQS} sequences, got {num_seqs}"
    return None


def refused(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new: NewTokens | None,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    queries: int = 1,
) -> str | None:
    """Why the kernel does not take these arguments, which are right for the op, whatever the GPU is; None: it does.

    Args:
        queries: tokens of each sequence in q.
    """
    if queries != 1:
        return f"q: expected one query token a sequence, got {queries}"
    if window is not None or soft_cap is not None:
        return "window, soft_cap: expected none of them"
    if k_cache.dtype != FP8 and any(scale is not None for scale in scales):
        return f"k_scale, v_scale: expected none of them but with a cache of {FP8}, not {k_cache.dtype}"
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    reason = unsuited(num_seqs, num_heads // num_kv_heads, head_dim, q.dtype, k_cache.dtype, block_size)
    if reason:
        return reason
    if new is not None and (new.k.dtype != q.dtype or new.v.dtype != q.dtype):
        return f"k, v: expected {q.dtype}, got {new.k.dtype} and {new.v.dtype}"
    if not 0 < num_blocks * block_size < 2**31:
        return f"k_cache: expected 1 to {2**31 - 1} slots, got {num_blocks * block_size}"
    # The copy engine reads slots by their number, whatever their block, in steps of 16 bytes.
    block, slot, head, _ = k_cache.stride()
    if num_blocks > 1 and block != block_size * slot:
        return f"k_cache: expected blocks one after the other, got strides {list(k_cache.stride())}"
    if (slot | head) * k_cache.element_size() % 16 or (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        return f"k_cache, v_cache: expected rows at multiples of 16 bytes, got strides {list(k_cache.stride())}"
    return None


def takes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    new: NewTokens | None,
    window: int | None = None,
    soft_cap: float | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    queries: int = 1,
) -> bool:
    """Whether `launch_hopper` can be used; the rest has the kernel for any GPU."""
    return has_hopper_kernels(q.device) and refused(q, k_cache, v_cache, new, window, soft_cap, scales, queries) is None


@functools.cache
def _hopper() -> tuple[Any, Any]:
    """(the kernel, `descriptor`), imported where they can run: Gluon is not in every Triton."""
    from nanovllm.kernels.triton.attention.decode_hopper_kernel import decode_hopper_kernel
    from nanovllm.kernels.triton.gluon_compat import descriptor

    return decode_hopper_kernel, descriptor


def launch_hopper(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    new: NewTokens | None,
    plan: HopperDecodePlan | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The launch behind the wrappers, which have checked the arguments, for what `refused` does not name.

    Args:
        scales, new: as for `launch_decode`.
        plan: instead of the tuned one, or where there is none of the one that `plan_hopper_decode` picks.

    Raises:
        ValueError: no kernel can be launched so.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    out = result_for(q, out)
    if not num_seqs:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    if plan is None:
        key = bucket(num_seqs), num_kv_heads, group, head_dim, q.dtype, k_cache.dtype, block_size, new is not None
        plan = tunables.ATTENTION_DECODE_HOPPER.find(q.device, *key)
    fp8, itemsize = k_cache.dtype == FP8, k_cache.element_size()
    if plan is None:
        sms = num_multiprocessors(q.device)
        plan = plan_hopper_decode(num_seqs, num_kv_heads, head_dim, sms, itemsize, new is not None, group)
    reason = plan.refused(head_dim, block_size, itemsize, group)
    if reason:
        raise ValueError(f"plan.{reason}")
    if plan.cluster and not launches_clusters():
        plan = replace(plan, cluster=0)
    programs = plan.programs(num_seqs, min(max_context_len, block_table.shape[1] * block_size))
    kernel, descriptor = _hopper()
    # In shared memory a tile is boxes, a box columns of 64 words of 16 bits, and a column lines of 128 bytes: so one request brings it.
    # Keys of 32 words are lines of 64 bytes.
    _, slot, head, _ = k_cache.stride()
    a_word = 2 // itemsize
    line = min(64, head_dim // a_word)
    columns = head_dim // a_word // line
    shape = (num_blocks * block_size // plan.box, columns, plan.box, num_kv_heads, line)
    strides = (plan.box * slot // a_word, line, slot // a_word, head // a_word, 1)
    tiles = [
        descriptor(
            cache.data_ptr(), torch.int16 if fp8 else q.dtype, shape, strides, (boxes, columns, plan.box, 1, line)
        )
        for boxes in (plan.tile // plan.box, 1)
        for cache in (k_cache, v_cache)
    ]
    k_scale, v_scale = scales
    k, v, angles = (q, q, q) if new is None else (new.k, new.v, new.cos_sin_cache)
    norm = new is not None and new.q_weight is not None
    launch = kernel[num_kv_heads, programs]
    if plan.cluster:
        grid = 1, num_kv_heads, programs // plan.cluster
        launch = functools.partial(launch_clusters, kernel, grid, plan.cluster)
    launch(
        out,
        q,
        k,
        v,
        *tiles,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        context_lens if k_scale is None else k_scale,
        context_lens if v_scale is None else v_scale,
        torch.empty((programs * num_kv_heads, group, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((programs * num_kv_heads, 2, group), dtype=torch.float32, device=q.device),
        arrival_counters(q.device, num_seqs * num_kv_heads),
        angles,
        new.q_weight if norm else q,
        new.k_weight if norm else q,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        angles.stride(0),
        0.0 if new is None else new.eps,
        slot,
        head,
        block_table.stride(0),
        scale * LOG2E,
        plan.pieces,
        plan.least,
        SEQS_PAD=padded_count(num_seqs),
        EMPTY_LAST=plan.empty_last,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WARPS=plan.warps,
        BOX=plan.box,
        SLOTS=plan.slots,
        CHUNK=plan.chunk,
        NEW=new is not None,
        NORM=norm,
        FP8=fp8,
        K_SCALES=num_scales(k_scale),
        V_SCALES=num_scales(v_scale),
        RELEASE=num_seqs <= ATTENTION_TOKENS,
        CLUSTER=plan.cluster,
        num_warps=plan.warps,
        launch_pdl=new is None or new.early,
    )
    return out
