"""Rotary position embedding of q and k, alone or with the RMS norm of each head before and the cache store after."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.op.tunable import Tunable, bucket
from nanovllm.kernels.ops.checks import FP8, check_positions, check_slots, check_store, values_checked
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, next_power_of_2, num_sms, warps_for
from nanovllm.kernels.triton.rows.move_rows import as_bytes, num_scales, slot_stride
from nanovllm.kernels.triton.rows.plans import POLICY, RowPolicy
from nanovllm.kernels.triton.rows.rotary_kernels import rotary_kernel, rotary_tokens_kernel


def _choice(
    tunable: Tunable, q: torch.Tensor, num_k_heads: int, num_heads: int, norm: bool, each: int, policy: RowPolicy
) -> tuple[int, int, int]:
    """(heads, warps, tokens) of a program, for `num_heads` heads a token in all.

    tokens: of a program of `rotary_tokens_kernel`, which has all heads of a token in tiles of `heads`; 0:
    `rotary_kernel` has the work. each: elements of a tile that a thread of `rotary_tokens_kernel` has at best.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    block = next_power_of_2(head_dim // 2)
    plan = tunable.find(q.device, bucket(num_tokens), num_q_heads, num_k_heads, head_dim, q.dtype, norm)
    heads = plan.heads if plan else min(8, num_q_heads & -num_q_heads, num_k_heads & -num_k_heads)
    warps = plan.warps if plan else warps_for(heads * block, each)
    # It takes many tokens, whole tiles of heads, and 64 registers a thread for the loads that are under way.
    uneven = num_q_heads % heads or num_k_heads % heads or head_dim & (head_dim - 1)
    large = num_heads * head_dim * q.element_size() > 256 * 32 * warps
    suited = num_tokens > policy.few_tokens and not uneven and not large and (plan or heads * block >= 256)
    tokens = 0 if not suited else 2 if num_heads > 32 and num_tokens % 2 == 0 else 1
    if plan or tokens:
        return heads, warps, tokens
    # The 16-byte loads of a warp cover 256 elements: 4 heads of 128. With few tokens a program of four warps has two
    # times that, not four times: more multiprocessors share the work, and a thread computes half as much.
    warp_heads = max(1, 256 // block)
    few = num_tokens * num_heads <= 16 * num_sms(q) * warp_heads
    return min(warp_heads * (2 if few else 4), next_power_of_2(max(num_q_heads, num_k_heads))), 4, 0


class _Store(NamedTuple):
    """Where `qk_norm_rope_store` stores k and v."""

    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def _launch(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, cos_sin_cache: torch.Tensor, policy: RowPolicy = POLICY,
    store: _Store | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(rotated q, rotated k: a new tensor, or the cache)."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    if head_dim % 2:
        raise ValueError(f"q: head_dim must be even, not {head_dim}")
    if values_checked(positions.device):
        check_positions(positions, cos_sin_cache)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = store.k_cache if store else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if not num_tokens:
        return q_out, k_out
    q, k, positions, cos_sin_cache = adjacent(q), adjacent(k), adjacent(positions), adjacent(cos_sin_cache)
    norm = q_weight is not None
    weights = (adjacent(q_weight), adjacent(k_weight)) if norm else (q, k)
    strides = *q.stride()[:2], *k.stride()[:2]
    if store:
        v = adjacent(store.v)
        slot = slot_stride(store.k_cache, "k_cache")  # and of v_cache, which has the same layout
        strides = *strides, *v.stride()[:2], cos_sin_cache.stride(0), slot, slot
        scales = (q if scale is None else scale for scale in (store.k_scale, store.v_scale))
        stored = as_bytes(store.k_cache), as_bytes(store.v_cache), store.slot_mapping.contiguous(), *scales
        early = has_dependent_launch(q.device)
        modes = True, num_scales(store.k_scale), num_scales(store.v_scale), store.k_cache.dtype == FP8, early
        tunable, num_heads, each = tunables.ROTARY_STORE, num_q_heads + 2 * num_k_heads, 4
    else:
        v, stored, early = k, (k_out, k_out, positions, q, q), False  # of these only the first k_out is used
        strides = *strides, 0, 0, cos_sin_cache.stride(0), 0, 0
        modes = False, 0, 0, False, early
        tunable, num_heads, each = tunables.ROTARY, num_q_heads + num_k_heads, 8
    heads, warps, tokens = _choice(tunable, q, num_k_heads, num_heads, norm, each, policy)
    block = next_power_of_2(head_dim // 2)
    tensors = positions, q, k, v, *weights, cos_sin_cache, q_out, *stored
    options = {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": early}
    if tokens:
        tokens = 1 if store else tokens
        rotary_tokens_kernel[(num_tokens // tokens,)](
            *tensors, *strides, eps, num_q_heads // heads, num_k_heads // heads, block, norm, heads, tokens, *modes,
            **options,
        )  # fmt: skip
    else:
        pieces = cdiv(num_q_heads, heads) + (2 if store else 1) * cdiv(num_k_heads, heads)
        rotary_kernel[(num_tokens, pieces)](
            *tensors, num_q_heads, num_k_heads, head_dim // 2, *strides, eps, norm, heads, block, *modes, **options
        )  # fmt: skip
    return q_out, k_out


def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, policy: RowPolicy = POLICY
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `rotary_embedding`. q and k may have any token and head strides, the table any row stride. Results are
    contiguous. Tensors whose last dimension is strided are copied.
    """
    return _launch(positions, q, k, None, None, 0.0, cos_sin_cache, policy)


def qk_norm_rope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    eps: float, cos_sin_cache: torch.Tensor, policy: RowPolicy = POLICY,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op `qk_norm_rope`. As `rotary_embedding`; weights are copied if strided."""
    return _launch(positions, q, k, q_weight, k_weight, eps, cos_sin_cache, policy)


def qk_norm_rope_store(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None, eps: float = 0.0, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, policy: RowPolicy = POLICY,
) -> torch.Tensor:  # fmt: skip
    """The op `qk_norm_rope_store`, in one kernel. As `qk_norm_rope`; v may be strided like k."""
    check_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if values_checked(k.device):
        check_slots(slot_mapping, k_cache)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight, k_weight: expected both or neither, got one")
    store = _Store(v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return _launch(positions, q, k, q_weight, k_weight, eps, cos_sin_cache, policy, store)[0]
