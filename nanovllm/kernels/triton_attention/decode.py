"""Decode attention over the paged KV cache: the wrapper, and the choice of tile sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nanovllm.kernels import tunables
from nanovllm.kernels.configs import bucket
from nanovllm.kernels.ops.checks import (
    FP8,
    check_attention,
    check_attention_values,
    check_new_tokens,
    values_checked,
)
from nanovllm.kernels.triton_attention.common import (
    LOG2E,
    as_words,
    num_multiprocessors,
    padded_count,
)
from nanovllm.kernels.triton_attention.decode_kernel import decode_kernel
from nanovllm.kernels.triton_decode.hopper import MAX_TOKENS
from nanovllm.kernels.triton_ops._counters import arrival_counters
from nanovllm.kernels.triton_ops._launch import cdiv, has_dependent_launch, next_power_of_2
from nanovllm.kernels.triton_ops.cache import num_scales


@dataclass(frozen=True)
class DecodePlan:
    """What is fixed when a launch is captured: it follows from shapes and the bound on the lengths alone."""

    pieces: int
    """The batch is cut into pieces of 1 / `pieces` of its tokens, or shorter where a sequence is."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int
    merge_registers: int
    """Registers a thread for the partial results that are merged at a time: few steps for many."""
    early: bool
    """Whether a piece's last tile is in registers before the queries are: `qk_norm_rope_attention` only."""
    least: int = 1
    """Tiles that no sequence is cut below."""

    def chunk(self, elements: int) -> int:
        """Partial results of `elements` each that are merged at a time."""
        return max(1, min(32, 32 * self.warps * self.merge_registers // elements))


@functools.cache
def plan_decode(
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    cache_itemsize: int,
    full_precision: bool,
    multiprocessors: int,
    rotate: bool,
) -> DecodePlan:
    """Measured on an H200 with bf16, fp8 and head_dim 128; other sizes get tiles of as many bytes.

    Args:
        cache_itemsize: bytes an element of the cache; tiles of float8 have twice the tokens of 16-bit ones where that pays.
        full_precision: whether products are float32, which no tensor core computes.
        rotate: for `qk_norm_rope_attention`.
    """
    pairs = num_seqs * num_kv_heads
    dim_pad = next_power_of_2(head_dim)
    bytes_per_token = 4 * dim_pad  # of a 16-bit cache
    small_tile = max(16, min(32, 16384 // bytes_per_token))
    large_tile = max(16, min(64, 32768 // bytes_per_token))
    warps = 2 if group <= 16 else 4 if group <= 32 else 8

    def pieces(programs_per_multiprocessor: float) -> int:
        return max(1, int(programs_per_multiprocessor * multiprocessors) // num_kv_heads)

    if full_precision:  # small tiles and many threads, or registers spill
        warps = 4 if group <= 16 and dim_pad <= 128 and cache_itemsize != 2 else 8
        return DecodePlan(pieces(2), 16, warps, stages=3 if dim_pad <= 128 else 2, merge_registers=16, early=False)
    if pairs >= 6 * multiprocessors:
        # Enough sequences to fill several waves: large tiles, since few streams at a time suit DRAM, and cut only what is
        # far longer than the average.
        warps *= min(cache_itemsize, 2)
        return DecodePlan(pieces(3), large_tile, warps, stages=3, merge_registers=32, early=False)
    if pairs >= 4 * multiprocessors:
        # About one wave: all programs resident at once.
        tile = large_tile if cache_itemsize == 1 else small_tile
        return DecodePlan(pieces(3), tile, warps, stages=4, merge_registers=32, early=False)
    # Latency counts: every sequence is cut, into single tiles if it is short.
    if dim_pad > 128:
        return DecodePlan(pieces(2), small_tile, warps, stages=3, merge_registers=32, early=False)
    if num_seqs <= 2 or group > 16:
        return DecodePlan(pieces(num_seqs), small_tile, warps, stages=3, merge_registers=64, early=rotate)
    if pairs >= 3 * multiprocessors:
        return DecodePlan(pieces(3), small_tile, warps, stages=3, merge_registers=64, early=False, least=2)
    if num_seqs > 8:
        return DecodePlan(pieces(4 if num_seqs <= 16 else 3), large_tile, 2, stages=2, merge_registers=64, early=rotate, least=2)
    # Programs of one warp, which waits for no other. Registers let eight run beside each other; where lengths do not divide
    # evenly there are a few pieces more than asked for. A merge of more pieces than three tiles give takes longer than it saves.
    tile = max(16, 8192 // bytes_per_token)
    if num_seqs <= 4:
        return DecodePlan(pieces(4), tile, 1, stages=2, merge_registers=64, early=rotate, least=2)
    return DecodePlan(pieces(7.5), tile, 1, stages=3, merge_registers=64, early=rotate, least=3)


@dataclass(frozen=True)
class NewTokens:
    """What `qk_norm_rope_attention` has beside the arguments of `attention_decode`."""

    k: torch.Tensor
    v: torch.Tensor
    cos_sin_cache: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float


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
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """One query token a sequence against its cached tokens: see `ops.attention.attention_decode`.

    Args:
        plan: instead of the one that `plan_decode` picks.

    Safe under CUDA graph capture; a replay may change context_lens (within max_context_len) and block_table. The same
    inputs give the same bits every time; a sequence's bits do depend on the lengths beside it.
    """
    check_attention(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale)
    if values_checked(q.device):
        check_attention_values(k_cache, block_table, context_lens, max_context_len)
    scales = (k_scale, v_scale)
    return launch_decode(
        q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window, soft_cap, scales, None, plan
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
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """The op `qk_norm_rope_attention`, in one kernel. q, k and v may have any token and head strides.

    As for `attention_decode`; a sequence of length 0 gets zeros, and nothing is stored for it.
    """
    check_attention(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale)
    check_new_tokens(q, k, v, k_cache, q_weight, k_weight)
    if q.shape[2] % 2:
        raise ValueError(f"q: head_dim must be even, not {q.shape[2]}")
    if values_checked(q.device):
        check_attention_values(k_cache, block_table, context_lens, max_context_len, torch.ones_like(context_lens))
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    new = NewTokens(k, v, cos_sin_cache, q_weight, k_weight, eps)
    scales = (k_scale, v_scale)
    return launch_decode(
        q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window, soft_cap, scales, new, plan
    )


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
) -> torch.Tensor:
    """The launch behind the wrappers, which have checked the arguments."""
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    fp8 = k_cache.dtype == FP8
    if plan is None:
        plan = tunables.ATTENTION_DECODE.find(
            q.device,
            bucket(num_seqs),
            num_kv_heads,
            group,
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
            num_kv_heads,
            group,
            head_dim,
            k_cache.element_size(),
            full_precision,
            num_multiprocessors(q.device),
            new is not None,
        )
    dim_pad = next_power_of_2(head_dim)
    group_pad = next_power_of_2(group)
    max_tokens = max(1, min(max_context_len, block_table.shape[1] * block_size))
    # A window that starts inside a tile reaches into one tile more.
    most_tiles = cdiv(max_tokens, plan.tile) if window is None else cdiv(min(max_tokens, window), plan.tile) + 1
    pieces = min(num_seqs - 1 + plan.pieces, num_seqs * most_tiles)
    slots = pieces * num_kv_heads
    k_words, v_words = as_words(k_cache), as_words(v_cache)
    k_scale, v_scale = scales
    k, v, angles = (q, q, q) if new is None else (new.k, new.v, new.cos_sin_cache)
    norm = new is not None and new.q_weight is not None
    parts = shared or SharedParts(context_lens, context_lens, out, out)
    dependent = has_dependent_launch(q.device)
    decode_kernel[num_kv_heads, pieces](
        out,
        q,
        k_words,
        v_words,
        block_table,
        context_lens,
        out if k_scale is None else k_scale,
        out if v_scale is None else v_scale,
        torch.empty((slots, group, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((slots, 2, group), dtype=torch.float32, device=q.device),
        arrival_counters(q.device, num_seqs * num_kv_heads),
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
        GROUP=group,
        GROUP_PAD=group_pad,
        ROWS=max(16, group_pad),
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
        # The output projection of so few tokens waits as well, and loads its weights before: let it start.
        RELEASE=dependent and num_seqs <= MAX_TOKENS,
        num_warps=plan.warps,
        num_stages=plan.stages,
        launch_pdl=dependent,
    )
    return out
