"""Decode attention for Hopper: what its kernel takes, and the launch. The kernel is in `decode_hopper_kernel.py`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_hopper_plan import HopperDecodePlan, plan_hopper_decode
from nanovllm.kernels.triton.attention.launch_helpers import (
    LOG2E,
    gluon_kernel,
    has_hopper_kernels,
    num_multiprocessors,
    padded_count,
    result_for,
)
from nanovllm.kernels.triton.cluster_launch import launch_clusters, launches_clusters
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.early_start import ATTENTION_TOKENS
from nanovllm.kernels.triton.rows.move_rows import num_scales

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


def refused(call: DecodeCall) -> str | None:
    """Why the kernel does not take these arguments, which are right for the op, on whatever GPU; None: it does."""
    q, kv = call.q, call.kv
    k_cache = kv.k_cache
    if call.queries != 1:
        return f"q: expected one query token a sequence, got {call.queries}"
    if not call.fp8 and (kv.k_scale is not None or kv.v_scale is not None):
        return f"k_scale, v_scale: expected none of them but with a cache of {FP8}, not {k_cache.dtype}"
    reason = unsuited(call.num_seqs, call.group, call.head_dim, q.dtype, k_cache.dtype, kv.block_size)
    if reason:
        return reason
    if call.new is not None and (call.new.k.dtype != q.dtype or call.new.v.dtype != q.dtype):
        return f"k, v: expected {q.dtype}, got {call.new.k.dtype} and {call.new.v.dtype}"
    num_slots = k_cache.shape[0] * kv.block_size
    if not 0 < num_slots < 2**31:
        return f"k_cache: expected 1 to {2**31 - 1} slots, got {num_slots}"
    # The copy engine reads slots by their number, whatever their block, in steps of 16 bytes.
    block, slot, head, _ = k_cache.stride()
    if k_cache.shape[0] > 1 and block != kv.block_size * slot:
        return f"k_cache: expected blocks one after the other, got strides {list(k_cache.stride())}"
    if (slot | head) * k_cache.element_size() % 16 or (k_cache.data_ptr() | kv.v_cache.data_ptr()) % 16:
        return f"k_cache, v_cache: expected rows at multiples of 16 bytes, got strides {list(k_cache.stride())}"
    return None


def takes(call: DecodeCall) -> bool:
    """Whether `launch_hopper_decode` can be used; other calls are for `launch_decode`."""
    return has_hopper_kernels(call.q.device) and refused(call) is None


def launch_hopper_decode(
    call: DecodeCall, plan: HopperDecodePlan | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The launch for what `refused` does not name.

    Args:
        plan: instead of the tuned one, or where there is none of the one that `plan_hopper_decode` picks.
        out: as for `decode.attention_decode`.

    Raises:
        ValueError: no kernel can be launched so.
    """
    q, kv, new, group, head_dim, num_seqs = call.q, call.kv, call.new, call.group, call.head_dim, call.num_seqs
    out = result_for(q, out)
    if not num_seqs:
        return out
    num_kv_heads = kv.num_kv_heads
    plan = _plan(call, plan)
    # Tiles of a window may be one more than its tokens fill.
    longest = kv.longest if call.window is None else min(kv.longest, call.window + plan.tile)
    programs = plan.programs(num_seqs, longest)
    kernel, _ = gluon_kernel("decode_hopper_kernel")
    k, v, angles = (q, q, q) if new is None else (new.k, new.v, new.cos_sin_cache)
    launch = kernel[num_kv_heads, programs]
    if plan.cluster:
        grid = 1, num_kv_heads, programs // plan.cluster
        launch = functools.partial(launch_clusters, kernel, grid, plan.cluster)
    launch(
        out, q, k, v, *_tiles(kv, q.dtype, plan), kv.k_cache, kv.v_cache, kv.block_table, kv.context_lens,
        kv.context_lens if kv.k_scale is None else kv.k_scale, kv.context_lens if kv.v_scale is None else kv.v_scale,
        torch.empty((programs * num_kv_heads, group, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((programs * num_kv_heads, 2, group), dtype=torch.float32, device=q.device),
        arrival_counters(q.device, num_seqs * num_kv_heads), angles, *call.weights, num_seqs, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], angles.stride(0), 0.0 if new is None else new.eps,
        *kv.k_cache.stride()[1:3], kv.block_table.stride(0), call.scale * LOG2E, plan.pieces, plan.least,
        SEQS_PAD=padded_count(num_seqs), EMPTY_LAST=plan.empty_last, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=kv.block_size, WARPS=plan.warps, BOX=plan.box, SLOTS=plan.slots, CHUNK=plan.chunk,
        NEW=new is not None, NORM=call.norm, FP8=call.fp8, K_SCALES=num_scales(kv.k_scale),
        V_SCALES=num_scales(kv.v_scale), RELEASE=num_seqs <= ATTENTION_TOKENS, CLUSTER=plan.cluster,
        SOFT_CAP=call.soft_cap or 0.0, WINDOW=call.window or 0, num_warps=plan.warps,
        launch_pdl=new is None or call.early,
    )  # fmt: skip
    return out


def _plan(call: DecodeCall, plan: HopperDecodePlan | None) -> HopperDecodePlan:
    """The plan to launch. ValueError: there is no kernel for it."""
    q, kv, new = call.q, call.kv, call.new is not None
    itemsize = kv.k_cache.element_size()
    if plan is None:
        key = (
            bucket(call.num_seqs), kv.num_kv_heads, call.group, call.head_dim, q.dtype, kv.k_cache.dtype, kv.block_size,
            new,
        )  # fmt: skip
        plan = tunables.ATTENTION_DECODE_HOPPER.find(q.device, *key)
    if plan is None:
        sms = num_multiprocessors(q.device)
        plan = plan_hopper_decode(call.num_seqs, kv.num_kv_heads, call.head_dim, sms, itemsize, new, call.group)
    reason = plan.refused(call.head_dim, kv.block_size, itemsize, call.group)
    if reason:
        raise ValueError(f"plan.{reason}")
    return replace(plan, cluster=0) if plan.cluster and not launches_clusters() else plan


def _tiles(kv: PagedKV, dtype: torch.dtype, plan: HopperDecodePlan) -> list[Any]:
    """Descriptors for the copy engine: of keys and values, whole tiles, and then single boxes.

    In shared memory a tile is boxes, a box columns of 64 words of 16 bits, and a column lines of 128 bytes: so one
    request brings it. Keys of 32 words are lines of 64 bytes.
    """
    _, descriptor = gluon_kernel("decode_hopper_kernel")
    num_blocks, block_size, num_kv_heads, head_dim = kv.k_cache.shape
    _, slot, head, _ = kv.k_cache.stride()
    fp8 = kv.k_cache.dtype == FP8
    a_word = 2 if fp8 else 1
    line = min(64, head_dim // a_word)
    columns = head_dim // a_word // line
    shape = (num_blocks * block_size // plan.box, columns, plan.box, num_kv_heads, line)
    strides = (plan.box * slot // a_word, line, slot // a_word, head // a_word, 1)
    word = torch.int16 if fp8 else dtype
    return [
        descriptor(cache.data_ptr(), word, shape, strides, (boxes, columns, plan.box, 1, line))
        for boxes in (plan.tile // plan.box, 1)
        for cache in (kv.k_cache, kv.v_cache)
    ]
