"""Rotary position embedding of q and k: alone, with the RMS norm of each head before it, and with the cache store after it.

A program takes one token and a few heads of q or of k. It loads the two halves of the heads as two tiles, since an
element is rotated with its partner in the other half.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels import tunables
from nanovllm.kernels.configs import bucket
from nanovllm.kernels.ops.checks import FP8, check_slots, check_store, values_checked
from nanovllm.kernels.triton_ops._launch import cdiv, has_dependent_launch, next_power_of_2, num_sms
from nanovllm.kernels.triton_ops._math import rounded, to_dtype
from nanovllm.kernels.triton_ops.cache import as_bytes, num_scales, slot_stride, store_quantised


@triton.jit
def _rotated_heads(
    x,
    weight,
    cos,
    sin,
    head,
    num_heads,
    head_stride,
    half_dim,
    eps,
    dtype: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The two halves of some heads of one token, rotated, as float32 with the precision of dtype; x points to its heads."""
    col = tl.arange(0, BLOCK)
    in_row = col < half_dim
    mask = (head < num_heads)[:, None] & in_row[None, :]
    source = x + head[:, None] * head_stride + col[None, :]
    x1 = tl.load(source, mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + half_dim, mask, other=0.0).to(tl.float32)
    if NORM:
        w1 = tl.load(weight + col, in_row, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + half_dim + col, in_row, other=0.0).to(tl.float32)[None, :]
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * half_dim) + eps)[:, None]
        x1 = rounded(rounded(x1 * scale, dtype) * w1, dtype)
        x2 = rounded(rounded(x2 * scale, dtype) * w2, dtype)
    # Every product is rounded, as in the reference; launched without contraction to FMA for the same reason.
    y1 = rounded(x1 * cos, dtype) - rounded(x2 * sin, dtype)
    y2 = rounded(x2 * cos, dtype) + rounded(x1 * sin, dtype)
    return rounded(y1, dtype), rounded(y2, dtype), mask


@triton.jit
def _rotate_heads(
    x, y, weight, cos, sin, first_head, num_heads, head_stride, half_dim, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads first_head .. first_head + HEADS - 1 of one token: x and y point to that token's heads."""
    dtype: tl.constexpr = y.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    y1, y2, mask = _rotated_heads(x, weight, cos, sin, head, num_heads, head_stride, half_dim, eps, dtype, NORM, BLOCK)
    target = y + head[:, None] * (2 * half_dim) + tl.arange(0, BLOCK)[None, :]
    tl.store(target, to_dtype(y1, dtype), mask)
    tl.store(target + half_dim, to_dtype(y2, dtype), mask)


@triton.jit
def _rotary_kernel(
    positions, q, k, q_weight, k_weight, cos_sin_cache, q_out, k_out,
    num_q_heads, num_k_heads, half_dim, q_stride, q_head_stride, k_stride, k_head_stride, cache_stride, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    col = tl.arange(0, BLOCK)
    table = cos_sin_cache + tl.load(positions + token).to(tl.int64) * cache_stride
    dtype: tl.constexpr = q_out.dtype.element_ty
    cos = rounded(tl.load(table + col, col < half_dim, other=0.0), dtype)[None, :]
    sin = rounded(tl.load(table + half_dim + col, col < half_dim, other=0.0), dtype)[None, :]
    q_pieces = tl.cdiv(num_q_heads, HEADS)
    if piece < q_pieces:
        _rotate_heads(
            q + token * q_stride, q_out + token * num_q_heads * (2 * half_dim), q_weight, cos, sin, piece * HEADS,
            num_q_heads, q_head_stride, half_dim, eps, NORM, HEADS, BLOCK,
        )  # fmt: skip
    else:
        _rotate_heads(
            k + token * k_stride, k_out + token * num_k_heads * (2 * half_dim), k_weight, cos, sin,
            (piece - q_pieces) * HEADS, num_k_heads, k_head_stride, half_dim, eps, NORM, HEADS, BLOCK,
        )  # fmt: skip


@triton.jit
def _store_kernel(
    positions, q, k, v, q_weight, k_weight, cos_sin_cache, q_out, k_cache, v_cache, slot_mapping, k_scale, v_scale,
    num_q_heads, num_k_heads, half_dim, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    cache_stride, k_slot_stride, v_slot_stride, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, pieces of HEADS heads): those of q, which are rotated, of k, rotated into its cache, of v, into its cache."""
    if DEPENDENT:
        # Only waits: a dependent that it let start could read the cache before the new tokens are there.
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    dtype: tl.constexpr = q_out.dtype.element_ty
    col = tl.arange(0, BLOCK)
    q_pieces = tl.cdiv(num_q_heads, HEADS)
    k_pieces = tl.cdiv(num_k_heads, HEADS)
    if piece < q_pieces + k_pieces:
        table = cos_sin_cache + tl.load(positions + token).to(tl.int64) * cache_stride
        cos = rounded(tl.load(table + col, col < half_dim, other=0.0).to(tl.float32), dtype)[None, :]
        sin = rounded(tl.load(table + half_dim + col, col < half_dim, other=0.0).to(tl.float32), dtype)[None, :]
        if piece < q_pieces:
            _rotate_heads(
                q + token * q_stride, q_out + token * num_q_heads * (2 * half_dim), q_weight, cos, sin, piece * HEADS,
                num_q_heads, q_head_stride, half_dim, eps, NORM, HEADS, BLOCK,
            )  # fmt: skip
        else:
            head = (piece - q_pieces) * HEADS + tl.arange(0, HEADS)
            y1, y2, mask = _rotated_heads(
                k + token * k_stride,
                k_weight,
                cos,
                sin,
                head,
                num_k_heads,
                k_head_stride,
                half_dim,
                eps,
                dtype,
                NORM,
                BLOCK,
            )
            slot = tl.load(slot_mapping + token).to(tl.int64)
            target = k_cache + slot * k_slot_stride + head[:, None] * (2 * half_dim) + col[None, :]
            known = tl.minimum(head, num_k_heads - 1)[:, None]
            store_quantised(target, y1, k_scale, known, mask, K_SCALES, FP8)
            store_quantised(target + half_dim, y2, k_scale, known, mask, K_SCALES, FP8)
    else:
        head = (piece - q_pieces - k_pieces) * HEADS + tl.arange(0, HEADS)
        mask = (head < num_k_heads)[:, None] & (col < half_dim)[None, :]
        slot = tl.load(slot_mapping + token).to(tl.int64)
        source = v + token * v_stride + head[:, None] * v_head_stride + col[None, :]
        target = v_cache + slot * v_slot_stride + head[:, None] * (2 * half_dim) + col[None, :]
        known = tl.minimum(head, num_k_heads - 1)[:, None]
        store_quantised(target, tl.load(source, mask), v_scale, known, mask, V_SCALES, FP8)
        store_quantised(target + half_dim, tl.load(source + half_dim, mask), v_scale, known, mask, V_SCALES, FP8)


def _heads_and_warps(num_tokens: int, num_heads: int, most_heads: int, block: int, x: torch.Tensor) -> tuple[int, int]:
    """Heads a program, and its warps, for `num_heads` heads a token in all, at most `most_heads` of one kind."""
    # A warp's 16-byte loads cover 256 elements: 4 heads of 128. A program has one warp for few tokens, so that many SMs
    # share the work, and four for many.
    warp_heads = max(1, 256 // block)
    warps = 1 if num_tokens * num_heads <= 8 * num_sms(x) * warp_heads else 4
    return min(warp_heads * warps, next_power_of_2(most_heads)), warps


def _launch(positions, q, k, q_weight, k_weight, eps, cos_sin_cache, norm):
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    if head_dim % 2:
        raise ValueError(f"q: head_dim must be even, not {head_dim}")
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if not num_tokens:
        return q_out, k_out
    q = q if q.stride(2) == 1 else q.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    block = next_power_of_2(head_dim // 2)
    plan = tunables.ROTARY.find(q.device, bucket(num_tokens), num_q_heads, num_k_heads, head_dim, q.dtype, norm)
    if plan:
        heads, warps = plan.heads, plan.warps
    else:
        heads, warps = _heads_and_warps(num_tokens, num_q_heads + num_k_heads, max(num_q_heads, num_k_heads), block, q)
    _rotary_kernel[(num_tokens, cdiv(num_q_heads, heads) + cdiv(num_k_heads, heads))](
        positions, q, k, q_weight, k_weight, cos_sin_cache, q_out, k_out,
        num_q_heads, num_k_heads, head_dim // 2, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        cos_sin_cache.stride(0), eps, norm, heads, block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `rotary_embedding`. q and k may have any token and head strides; results are contiguous."""
    return _launch(positions, q, k, q, k, 0.0, cos_sin_cache, False)


def qk_norm_rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `qk_norm_rope`. q and k may have any token and head strides; results are contiguous."""
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
    """The op `qk_norm_rope_store`, in one kernel. q, k and v may have any token and head strides."""
    check_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if values_checked(k.device):
        check_slots(slot_mapping, k_cache)
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
    block = next_power_of_2(head_dim // 2)
    norm = q_weight is not None
    plan = tunables.ROTARY_STORE.find(q.device, bucket(num_tokens), num_q_heads, num_k_heads, head_dim, q.dtype, norm)
    if plan:
        heads, warps = plan.heads, plan.warps
    else:
        most = max(num_q_heads, num_k_heads)
        heads, warps = _heads_and_warps(num_tokens, num_q_heads + 2 * num_k_heads, most, block, q)
    dependent = has_dependent_launch(q.device)
    slots = slot_stride(k_cache, "k_cache")  # and of v_cache, which is laid out alike
    _store_kernel[(num_tokens, cdiv(num_q_heads, heads) + 2 * cdiv(num_k_heads, heads))](
        positions, q, k, v, q if q_weight is None else q_weight, k if k_weight is None else k_weight, cos_sin_cache, q_out,
        as_bytes(k_cache), as_bytes(v_cache), slot_mapping.contiguous(), q if k_scale is None else k_scale,
        q if v_scale is None else v_scale, num_q_heads, num_k_heads, head_dim // 2, *q_stride[:2], *k_stride[:2],
        *v_stride[:2], cos_sin_cache.stride(0), slots, slots, eps, norm, heads, block, num_scales(k_scale), num_scales(v_scale),
        k_cache.dtype == FP8, dependent, num_warps=warps, enable_fp_fusion=False, launch_pdl=dependent,
    )  # fmt: skip
    return q_out
