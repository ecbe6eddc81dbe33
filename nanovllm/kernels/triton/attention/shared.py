"""Decode attention of sequences that share leading blocks: these are read once for all of them. The wrappers, and the choice of tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from nanovllm.kernels.ops.checks import FP8, check_decode, check_new_tokens, values_checked
from nanovllm.kernels.ops.shared_prefixes import check_shared, check_shared_values
from nanovllm.kernels.triton.attention.common import (
    LOG2E,
    as_words,
    num_multiprocessors,
    padded_count,
)
from nanovllm.kernels.triton.attention.decode import (
    NewTokens,
    SharedParts,
    attention_decode,
    launch_decode,
    new_tokens,
)
from nanovllm.kernels.triton.attention.decode import qk_norm_rope_attention as unshared
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan, plan_decode
from nanovllm.kernels.triton.attention.shared_kernel import shared_kernel
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.launch import next_power_of_2
from nanovllm.kernels.triton.rows.move_rows import num_scales

# Partial results of the shared part take at most about this, since a graph's memory has to have room for them.
_PARTIAL_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SharedPlan:
    """What is fixed when a launch is captured: it follows from shapes alone."""

    rows: int
    """Query rows a tile: sequences x query heads of a KV head."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int
    programs: int
    """For each KV head; no more than run at a time, since none of them is short."""
    pieces: int
    """That a row tile is cut into at most, at least 2; bounds the memory for partial results."""


@functools.cache
def plan_shared(
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    cache_itemsize: int,
    full_precision: bool,
    multiprocessors: int,
    warpgroups: bool,
) -> SharedPlan:
    """Predicted, then timed as it is (docs/attention.md): with 16-bit and float8 caches at head_dim 128, little else was tried. Not
    timed for other head sizes, float32 and GPUs before Hopper. The arguments are those of `plan_decode`.

    Args:
        warpgroups: whether four warps multiply together (sm_90 and later), which keeps registers free for large tiles.
    """
    dim_pad = next_power_of_2(head_dim)
    most = next_power_of_2(max(16, num_seqs * group))
    if full_precision:  # products on CUDA cores: small tiles and many threads, or registers spill
        rows, tile, warps, stages, together = min(most, 16 if cache_itemsize == 2 else 32), 16, 8, 2, 1
    elif cache_itemsize == 1 or head_dim != dim_pad:
        # Converted tiles, or queries that are rotated in twice the registers.
        rows, warps, together = min(most, 32), 4, 2
        tile, stages = max(16, min(64, 8192 // dim_pad)), 3
    elif warpgroups and most >= 128 and dim_pad <= 128:
        # Two warpgroups of 64 rows: 128 flops for each byte of K and V that comes from L2.
        rows, tile, warps, stages, together = 128, 64, 8, 3, 1
    else:
        rows, warps, together = min(most, 64 if dim_pad <= 128 else 32), 4, 2
        tile, stages = 64 if dim_pad <= 64 else 32, 3 if dim_pad <= 128 else 2
    programs = max(1, together * multiprocessors // num_kv_heads)
    cap = _PARTIAL_BYTES // (4 * num_seqs * num_kv_heads * group * head_dim)
    return SharedPlan(rows, tile, warps, stages, programs, max(2, min(programs + 1, max(4, cap))))


@functools.cache
def plan_rest(
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    cache_itemsize: int,
    full_precision: bool,
    multiprocessors: int,
) -> DecodePlan:
    """For the tokens behind the shared ones. The arguments are those of `plan_decode`."""
    # Measured with programs of one warp for less than a wave, as up to eight sequences have them.
    alike = min(num_seqs, 8) if num_seqs * num_kv_heads < 4 * multiprocessors else num_seqs
    plan = plan_decode(alike, num_kv_heads, group, head_dim, cache_itemsize, full_precision, multiprocessors, False)
    if full_precision or cache_itemsize == 1:
        return plan
    # What a sequence has for itself is a few tiles, so that a program mostly starts and ends: half the tile lets twice the programs
    # run beside each other.
    tile = max(16, min(plan.tile, 16384 // (4 * next_power_of_2(head_dim))))
    # Rows of 256 elements want the registers of all warps.
    return replace(plan, tile=tile, warps=plan.warps // 2 if tile < plan.tile and head_dim <= 128 else plan.warps)


def attention_decode_shared(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    groups: torch.Tensor,
    group_rows: torch.Tensor,
    shared_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    plan: SharedPlan | None = None,
    rest: DecodePlan | None = None,
) -> torch.Tensor:
    """The op `attention_decode_shared`: a pass over what groups share, a pass over the rest, which merges the two.

    Args:
        plan, rest: instead of those that `plan_shared` and `plan_rest` pick.

    Safe under CUDA graph capture; a replay may change context_lens, block_table and the groups. The same inputs give the same
    bits every time; a sequence's bits do depend on its company. With a window nothing is shared.
    """
    if window is not None:
        return attention_decode(
            q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window, soft_cap, k_scale, v_scale
        )
    check_decode(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale)
    check_shared(context_lens, groups, group_rows, shared_lens)
    if values_checked(q.device):
        check_shared_values(k_cache, block_table, context_lens, max_context_len, groups, group_rows, shared_lens)
    return _launch(
        q, k_cache, v_cache, block_table, context_lens, (groups, group_rows, shared_lens), max_context_len, scale, soft_cap,
        (k_scale, v_scale), None, plan, rest,
    )  # fmt: skip


def qk_norm_rope_attention_shared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    groups: torch.Tensor,
    group_rows: torch.Tensor,
    shared_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    plan: SharedPlan | None = None,
    rest: DecodePlan | None = None,
) -> torch.Tensor:
    """The op `qk_norm_rope_attention_shared`; both passes normalise and rotate their own queries. As `attention_decode_shared`."""
    if window is not None:
        return unshared(
            q, k, v, cos_sin_cache, k_cache, v_cache, block_table, context_lens, max_context_len, scale, q_weight, k_weight,
            eps, window, soft_cap, k_scale, v_scale,
        )  # fmt: skip
    check_decode(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale)
    check_new_tokens(q, k, v, k_cache, q_weight, k_weight)
    check_shared(context_lens, groups, group_rows, shared_lens)
    if q.shape[2] % 2:
        raise ValueError(f"q: head_dim must be even, not {q.shape[2]}")
    if values_checked(q.device):
        check_shared_values(
            k_cache, block_table, context_lens, max_context_len, groups, group_rows, shared_lens, cos_sin_cache.shape[0]
        )
    new = new_tokens(k, v, cos_sin_cache, q_weight, k_weight, eps)
    return _launch(
        q, k_cache, v_cache, block_table, context_lens, (groups, group_rows, shared_lens), max_context_len, scale, soft_cap,
        (k_scale, v_scale), new, plan, rest,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    prefixes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_context_len: int,
    scale: float,
    soft_cap: float | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    new: NewTokens | None,
    plan: SharedPlan | None,
    rest: DecodePlan | None,
) -> torch.Tensor:
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    groups, group_rows, shared_lens = prefixes
    options = (max_context_len, scale, None, soft_cap, scales, new)
    if not num_seqs or not len(groups):
        return launch_decode(q, k_cache, v_cache, block_table, context_lens, *options, rest)
    q = q if q.stride(2) == 1 else q.contiguous()
    fp8 = k_cache.dtype == FP8
    full_precision = q.dtype == torch.float32 or not (fp8 or k_cache.dtype == q.dtype)
    sizes = (
        num_seqs, num_kv_heads, group, head_dim, k_cache.element_size(), full_precision, num_multiprocessors(q.device),
    )  # fmt: skip
    dependent = has_dependent_launch(q.device)
    plan = plan or plan_shared(*sizes, warpgroups=dependent)
    float32, int32 = ({"dtype": dtype, "device": q.device} for dtype in (torch.float32, torch.int32))
    parts = SharedParts(
        shared_lens,
        torch.empty((num_seqs, group), **int32),
        torch.empty((plan.pieces, num_seqs, num_heads, head_dim), **float32),
        torch.empty((plan.pieces, 2, num_seqs, num_heads), **float32),
    )
    k_words, v_words = as_words(k_cache), as_words(v_cache)
    k_scale = scales[0]
    norm = new is not None and new.q_weight is not None
    angles = q if new is None else new.cos_sin_cache
    shared_kernel[num_kv_heads, plan.programs](
        q,
        k_words,
        v_words,
        block_table,
        context_lens,
        groups,
        group_rows,
        parts.acc if k_scale is None else k_scale,
        parts.acc,
        parts.ml,
        parts.counts,
        angles,
        new.q_weight if norm else q,
        num_seqs,
        len(groups),
        q.stride(0),
        q.stride(1),
        angles.stride(0),
        0.0 if new is None else new.eps,
        k_words.stride(0),
        k_words.stride(1),
        k_words.stride(2),
        block_table.stride(0),
        scale * LOG2E,
        PIECES=plan.pieces,
        GROUPS_PAD=padded_count(len(groups)),
        GROUP=group,
        ROWS=plan.rows,
        HEAD_DIM=head_dim,
        DIM_PAD=next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        SOFT_CAP=soft_cap or 0.0,
        STAGES=plan.stages,
        FP8=fp8,
        K_SCALES=num_scales(k_scale),
        ROTATE=new is not None,
        NORM=norm,
        DEPENDENT=dependent,
        num_warps=plan.warps,
        num_stages=plan.stages,
        launch_pdl=dependent,
    )
    return launch_decode(
        q, k_cache, v_cache, block_table, context_lens, *options, rest or plan_rest(*sizes), shared=parts
    )
