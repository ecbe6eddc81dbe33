"""Which calls of the layers' ops the C++ kernels do not take: the functions `accepts` of their providers."""

from __future__ import annotations

import torch

from nanovllm.kernels.ops.paged_kv import PagedKV

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations and caches. Their places are the values of `Format` in formats.h."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    """Of `rms_norm`."""
    return _not_alike(x, weight)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    """Of `add_rms_norm`."""
    return _not_alike(x, residual, weight)


def silu_and_mul(gate_up: torch.Tensor) -> str | None:
    """Of `silu_and_mul`."""
    return _not_alike(gate_up)


def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor
) -> str | None:
    """Of `rotary_embedding`."""
    return _wrong_table(cos_sin_cache) or _not_alike(q, k)


def qk_norm_rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
) -> str | None:
    """Of `qk_norm_rope`."""
    return _wrong_table(cos_sin_cache) or _not_alike(q, k, q_weight, k_weight)


def store_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> str | None:
    """Of `store_kvcache`."""
    return _not_alike(k, v) or _wrong_cache(k_cache, v_cache, k_scale, v_scale)


def attention_decode(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> str | None:
    """Of `attention_decode`."""
    return _wrong_queries(q) or _wrong_cache(kv.k_cache, kv.v_cache, kv.k_scale, kv.v_scale)


def attention_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """Of `attention_prefill`."""
    return _wrong_queries(q) or _wrong_cache(kv.k_cache, kv.v_cache, kv.k_scale, kv.v_scale)


def _not_alike(x: torch.Tensor, *others: torch.Tensor) -> str | None:
    dtype = x.dtype
    if dtype not in PLAIN:
        return _wrong_dtype("", dtype)
    for other in others:
        if other.dtype is not dtype:
            return f"tensors of {dtype} and {other.dtype}".replace("torch.", "")
    return None


def _wrong_queries(q: torch.Tensor) -> str | None:
    if q.dtype not in PLAIN:
        return _wrong_dtype("q: ", q.dtype)
    return f"head_dim={q.shape[-1]}: expected a multiple of 16" if q.shape[-1] % 16 else None


def _wrong_table(cos_sin_cache: torch.Tensor) -> str | None:
    if cos_sin_cache.dtype is torch.float32:
        return None
    return _wrong_dtype("cos_sin_cache: ", cos_sin_cache.dtype, "float32")


def _wrong_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> str | None:
    if k_cache.dtype not in PLAIN:
        return _wrong_dtype("k_cache: ", k_cache.dtype)
    if k_scale is not None or v_scale is not None:
        return "a cache with k_scale or v_scale"
    return None if k_cache.is_contiguous() and v_cache.is_contiguous() else "a cache that is not contiguous"


def _wrong_dtype(name: str, dtype: torch.dtype, expected: str = "float32, bfloat16 or float16") -> str:
    return f"{name}expected {expected}, not {str(dtype).removeprefix('torch.')}"
