"""Decode attention over the paged KV cache: the wrappers, and the launch of the kernel for any GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.ops.checks import (
    FP8,
    check_attention_values,
    check_decode,
    check_new_tokens,
    check_query_tokens,
    values_checked,
)
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.attention.common import LOG2E, as_words, num_multiprocessors, padded_count, result_for
from nanovllm.kernels.triton.attention.decode_hopper import launch_hopper, refused, takes
from nanovllm.kernels.triton.attention.decode_kernel import decode_kernel
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan, HopperDecodePlan, plan_decode, tokens_together
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.early_start import ATTENTION_TOKENS, are_constant, has_dependent_launch
from nanovllm.kernels.triton.launch import adjacent, cdiv, next_power_of_2
from nanovllm.kernels.triton.rows.move_rows import num_scales


@dataclass(frozen=True)
class NewTokens:
    """What `qk_norm_rope_attention` has beside the arguments of `attention_decode`."""

    k: torch.Tensor
    v: torch.Tensor
    cos_sin_cache: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    early: bool = False
    """Whether angles and weights may be read before the kernel in front has ended."""


def new_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> NewTokens:
    """`NewTokens` as kernels address them: what is strided within a row is copied, and then not read early."""
    angles, q_weight, k_weight = adjacent(cos_sin_cache), adjacent(q_weight), adjacent(k_weight)
    early = angles is cos_sin_cache and are_constant(q_weight, k_weight)
    return NewTokens(adjacent(k), adjacent(v), angles, q_weight, k_weight, eps, early)


@dataclass(frozen=True)
class SharedParts:
    """What `shared_kernel` leaves: the arguments of `shared_start`."""

    lens: torch.Tensor
    """[num_seqs] int32: the leading tokens of each sequence that are done."""
    counts: torch.Tensor
    acc: torch.Tensor
    ml: torch.Tensor


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    plan: DecodePlan | HopperDecodePlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last token of each sequence, or the last n of each, against its cached tokens: see `ops.attention.attention_decode`.

    Args:
        plan: instead of the one that `plan_decode` or `plan_hopper_decode` picks; its class says which kernel is launched. A
            `HopperDecodePlan` needs a Hopper GPU, and arguments that `decode_hopper.refused` does not name.
        out: contiguous, as q: takes the result, and is returned.

    Safe under CUDA graph capture; a replay may change context_lens (within max_context_len) and block_table. The same
    inputs give the same bits every time; a sequence's bits do depend on the lengths beside it, and on n. A kernel is compiled for
    each n.
    """
    queries = check_query_tokens(
        q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale
    )
    if values_checked(q.device):
        check_attention_values(k_cache, block_table, context_lens, max_context_len)
    if not block_table.shape[1]:
        return result_for(q, out).zero_()
    scales = (k_scale, v_scale)
    return _launch(
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        max_context_len,
        scale,
        window,
        soft_cap,
        scales,
        None,
        plan,
        queries,
        out,
    )


def qk_norm_rope_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
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
    plan: DecodePlan | HopperDecodePlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op `qk_norm_rope_attention`, in one kernel. q, k and v may have any token and head strides, the table any between rows.

    Elements that are not side by side, of the weights too, are copied.
    As for `attention_decode`, plan and out too; a sequence of length 0 gets zeros, and nothing is stored for it.
    """
    check_decode(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale)
    check_new_tokens(q, k, v, k_cache, q_weight, k_weight)
    if q.shape[2] % 2:
        raise ValueError(f"q: head_dim must be even, not {q.shape[2]}")
    if values_checked(q.device):
        check_attention_values(k_cache, block_table, context_lens, max_context_len, positions=cos_sin_cache.shape[0])
    new = new_tokens(k, v, cos_sin_cache, q_weight, k_weight, eps)
    scales = (k_scale, v_scale)
    return _launch(
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        max_context_len,
        scale,
        window,
        soft_cap,
        scales,
        new,
        plan,
        out=out,
    )


def _launch(
    q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window, soft_cap, scales, new, plan, queries=1,
    out=None,
) -> torch.Tensor:  # fmt: skip
    """The kernel for Hopper where it takes the call, else the one for any GPU; with a plan, the plan's."""
    given = q, k_cache, v_cache, block_table, context_lens, max_context_len, scale
    if isinstance(plan, HopperDecodePlan):
        reason = refused(q, k_cache, v_cache, new, window, soft_cap, scales, queries)
        if reason:
            raise ValueError(f"{reason}; a HopperDecodePlan is for its kernel only")
        return launch_hopper(*given, scales, new, plan, out)
    if plan is None and takes(q, k_cache, v_cache, new, window, soft_cap, scales, queries):
        return launch_hopper(*given, scales, new, None, out)
    return launch_decode(*given, window, soft_cap, scales, new, plan, None, queries, out)


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    new: NewTokens | None,
    plan: DecodePlan | None,
    shared: SharedParts | None = None,
    queries: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The launch of the kernel for any GPU behind the wrappers, which have checked the arguments.

    Args:
        queries: tokens of each sequence in q; 1 with `new` or `shared`.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    num_seqs, rows, columns = num_tokens, group, num_kv_heads
    if queries > 1:
        # For a plan the rows of a tile are the heads of a group, and a KV head with several tiles is as many of them.
        num_seqs //= queries
        together = tokens_together(queries, group)
        rows, columns = together * group, cdiv(queries, together) * num_kv_heads
    out = result_for(q, out)
    if not num_seqs:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    fp8 = k_cache.dtype == FP8
    if plan is None:
        plan = tunables.ATTENTION_DECODE.find(
            q.device,
            bucket(num_seqs),
            columns,
            rows,
            head_dim,
            q.dtype,
            k_cache.dtype,
            block_size,
            new is not None,
        )
    if plan is None:
        full_precision = q.dtype == torch.float32 or not (fp8 or k_cache.dtype == q.dtype)
        plan = plan_decode(
            num_seqs,
            columns,
            rows,
            head_dim,
            k_cache.element_size(),
            full_precision,
            num_multiprocessors(q.device),
            new is not None,
        )
    dim_pad = next_power_of_2(head_dim)
    group_pad = next_power_of_2(rows)
    max_tokens = max(1, min(max_context_len, block_table.shape[1] * block_size))
    # A window that starts inside a tile reaches into one tile more.
    most_tiles = (
        cdiv(max_tokens, plan.tile) if window is None else cdiv(min(max_tokens, window + queries - 1), plan.tile) + 1
    )
    pieces = min(num_seqs - 1 + plan.pieces, num_seqs * most_tiles)
    slots = pieces * columns
    k_words, v_words = as_words(k_cache), as_words(v_cache)
    k_scale, v_scale = scales
    k, v, angles = (q, q, q) if new is None else (new.k, new.v, new.cos_sin_cache)
    norm = new is not None and new.q_weight is not None
    parts = shared or SharedParts(context_lens, context_lens, out, out)
    dependent = has_dependent_launch(q.device)
    decode_kernel[columns, pieces](
        out,
        q,
        k_words,
        v_words,
        block_table,
        context_lens,
        out if k_scale is None else k_scale,
        out if v_scale is None else v_scale,
        torch.empty((slots, rows, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((slots, 2, rows), dtype=torch.float32, device=q.device),
        arrival_counters(q.device, num_seqs * columns),
        k,
        v,
        angles,
        new.q_weight if norm else q,
        new.k_weight if norm else q,
        parts.lens,
        parts.counts,
        parts.acc,
        parts.ml,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        angles.stride(0),
        0.0 if new is None else new.eps,
        k_words.stride(0),
        k_words.stride(1),
        k_words.stride(2),
        block_table.stride(0),
        scale * LOG2E,
        PIECES=plan.pieces,
        LEAST=plan.least,
        SEQS_PAD=padded_count(num_seqs),
        QUERIES=queries,
        GROUP=group,
        GROUP_PAD=group_pad,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        CHUNK=plan.chunk(group_pad * dim_pad),
        SOFT_CAP=soft_cap or 0.0,
        WINDOW=window or 0,
        STAGES=plan.stages,
        FP8=fp8,
        K_SCALES=num_scales(k_scale),
        V_SCALES=num_scales(v_scale),
        ROTATE=new is not None,
        NORM=norm,
        SHARED=shared is not None,
        EARLY=plan.early and new is not None and shared is None,
        DEPENDENT=dependent,
        RELEASE=dependent and num_tokens <= ATTENTION_TOKENS,
        num_warps=plan.warps,
        num_stages=plan.stages,
        launch_pdl=dependent and (new is None or new.early),
    )
    return out
