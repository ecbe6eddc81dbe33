"""Rotary position embedding of q and k: alone, with the RMS norm of each head before it, and with the cache store after it."""

import torch

from nanovllm.kernels.op.tunable import Tunable, bucket
from nanovllm.kernels.ops.checks import FP8, check_positions, check_slots, check_store, values_checked
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.launch import adjacent, cdiv, next_power_of_2, num_sms, warps_for
from nanovllm.kernels.triton.rows.move_rows import as_bytes, num_scales, slot_stride
from nanovllm.kernels.triton.rows.rotary_kernels import (
    rotary_kernel,
    rotary_tokens_kernel,
    store_kernel,
    store_tokens_kernel,
)

_MANY_TOKENS = 1024


def _heads_and_warps(num_tokens: int, num_heads: int, most_heads: int, block: int, x: torch.Tensor) -> tuple[int, int]:
    """Heads a program, and its warps, for `num_heads` heads a token in all, at most `most_heads` of one kind."""
    # A warp's 16-byte loads cover 256 elements: 4 heads of 128. Of few tokens a program has half as many heads as its four warps could
    # load so: the work is spread over more SMs, and what a thread computes one after the other is half as long.
    warp_heads = max(1, 256 // block)
    few = num_tokens * num_heads <= 16 * num_sms(x) * warp_heads
    return min(warp_heads * (2 if few else 4), next_power_of_2(most_heads)), 4


def _tokens(
    num_tokens: int,
    num_q_heads: int,
    num_k_heads: int,
    num_heads: int,
    head_dim: int,
    itemsize: int,
    heads: int,
    warps: int,
) -> int:
    """Tokens a program of the kernels that take all their heads, `num_heads`, in tiles of `heads`; 0: they do not take them.

    They need many tokens, heads that come out even, and 64 registers a thread for what they have under way.
    """
    uneven = num_q_heads % heads or num_k_heads % heads or head_dim & (head_dim - 1)
    if num_tokens <= _MANY_TOKENS or uneven or num_heads * head_dim * itemsize > 256 * 32 * warps:
        return 0
    return 2 if num_heads > 32 and num_tokens % 2 == 0 else 1


def _choice(
    tunable: Tunable, q: torch.Tensor, num_k_heads: int, num_heads: int, norm: bool, each: int
) -> tuple[int, int, int]:
    """(heads, warps, tokens) of a program for `num_heads` heads a token in all; tokens 0: of some heads of one token.

    each: elements of a tile that a thread has at best where a program has all of a token's.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    shape = num_tokens, num_q_heads, num_k_heads, num_heads, head_dim, q.element_size()
    plan = tunable.find(q.device, bucket(num_tokens), num_q_heads, num_k_heads, head_dim, q.dtype, norm)
    if plan:
        return plan.heads, plan.warps, _tokens(*shape, plan.heads, plan.warps)
    block = next_power_of_2(head_dim // 2)
    heads = min(8, num_q_heads & -num_q_heads, num_k_heads & -num_k_heads)
    warps = warps_for(heads * block, each)
    tokens = _tokens(*shape, heads, warps) if heads * block >= 256 else 0
    if not tokens:
        heads, warps = _heads_and_warps(num_tokens, num_heads, max(num_q_heads, num_k_heads), block, q)
    return heads, warps, tokens


def _launch(positions, q, k, q_weight, k_weight, eps, cos_sin_cache, norm):
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    if head_dim % 2:
        raise ValueError(f"q: head_dim must be even, not {head_dim}")
    if values_checked(positions.device):
        check_positions(positions, cos_sin_cache)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if not num_tokens:
        return q_out, k_out
    positions, q, k, q_weight, k_weight, cos_sin_cache = map(
        adjacent, (positions, q, k, q_weight, k_weight, cos_sin_cache)
    )
    block = next_power_of_2(head_dim // 2)
    heads, warps, tokens = _choice(tunables.ROTARY, q, num_k_heads, num_q_heads + num_k_heads, norm, 8)
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin_cache.stride(0)
    weights = (q_weight, k_weight) if norm else (q, k)
    if tokens:
        rotary_tokens_kernel[(num_tokens // tokens,)](
            positions, q, k, *weights, cos_sin_cache, q_out, k_out, *strides, eps, num_q_heads // heads,
            num_k_heads // heads, block, norm, heads, tokens, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        return q_out, k_out
    rotary_kernel[(num_tokens, cdiv(num_q_heads, heads) + cdiv(num_k_heads, heads))](
        positions, q, k, *weights, cos_sin_cache, q_out, k_out, num_q_heads, num_k_heads, head_dim // 2, *strides,
        eps, norm, heads, block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `rotary_embedding`. q and k may have any token and head strides, the table any between rows; results are contiguous.

    Elements that are not side by side, of positions too, are copied.
    """
    return _launch(positions, q, k, None, None, 0.0, cos_sin_cache, False)


def qk_norm_rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `qk_norm_rope`. As `rotary_embedding`; weights are copied if strided."""
    return _launch(positions, q, k, q_weight, k_weight, eps, cos_sin_cache, True)


def qk_norm_rope_store(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op `qk_norm_rope_store`, in one kernel. As `qk_norm_rope`; v may be strided like k."""
    check_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if values_checked(k.device):
        check_slots(slot_mapping, k_cache)
        check_positions(positions, cos_sin_cache)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight, k_weight: expected both or neither, got one")
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    if head_dim % 2:
        raise ValueError(f"q: head_dim must be even, not {head_dim}")
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return q_out
    q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
    if not q_stride[2] == k_stride[2] == v_stride[2] == 1:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        q_stride, k_stride, v_stride = q.stride(), k.stride(), v.stride()
    positions, cos_sin_cache = adjacent(positions), adjacent(cos_sin_cache)
    q_weight, k_weight = adjacent(q_weight), adjacent(k_weight)
    block = next_power_of_2(head_dim // 2)
    norm = q_weight is not None
    heads, warps, tokens = _choice(tunables.ROTARY_STORE, q, num_k_heads, num_q_heads + 2 * num_k_heads, norm, 4)
    dependent = has_dependent_launch(q.device)
    slots = slot_stride(k_cache, "k_cache")  # and of v_cache, which is laid out alike
    tensors = (
        positions, q, k, v, q if q_weight is None else q_weight, k if k_weight is None else k_weight, cos_sin_cache, q_out,
        as_bytes(k_cache), as_bytes(v_cache), slot_mapping.contiguous(), q if k_scale is None else k_scale,
        q if v_scale is None else v_scale,
    )  # fmt: skip
    strides = *q_stride[:2], *k_stride[:2], *v_stride[:2], cos_sin_cache.stride(0), slots, slots
    kinds = num_scales(k_scale), num_scales(v_scale), k_cache.dtype == FP8, dependent
    if tokens:
        store_tokens_kernel[(num_tokens,)](
            *tensors, *strides, eps, num_q_heads // heads, num_k_heads // heads, block, norm, heads, *kinds,
            num_warps=warps, enable_fp_fusion=False, launch_pdl=dependent,
        )  # fmt: skip
        return q_out
    store_kernel[(num_tokens, cdiv(num_q_heads, heads) + 2 * cdiv(num_k_heads, heads))](
        *tensors, num_q_heads, num_k_heads, head_dim // 2, *strides, eps, norm, heads, block, *kinds,
        num_warps=warps, enable_fp_fusion=False, launch_pdl=dependent,
    )  # fmt: skip
    return q_out
