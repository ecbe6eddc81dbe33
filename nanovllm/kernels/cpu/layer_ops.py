"""The ops between a layer's products, each a call of the C++ library: norms, SiLU, rotations, attention.

Layers that run op by op call these. `decoder_step` computes the same inside of one call.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from nanovllm.kernels.cpu.build import load_library
from nanovllm.kernels.cpu.layer_op_limits import PLAIN
from nanovllm.kernels.cpu.library import checked, threads
from nanovllm.kernels.ops.checks import (
    check_attention,
    check_positions,
    check_prefill,
    check_query_tokens,
    check_slots,
    check_store,
)
from nanovllm.kernels.ops.paged_kv import PagedKV

_FORMATS = {dtype: place for place, dtype in enumerate(PLAIN)}


@cache
def _library() -> ctypes.CDLL:
    lib, size, address = load_library(), c_int64, c_void_p
    lib.nanovllm_rms_norm.argtypes = [
        address, c_int32, address, size, address, size, address, size, size, c_float, address, address,
    ]  # fmt: skip
    lib.nanovllm_silu_and_mul.argtypes = [address, c_int32, address, size, size, size, address]
    lib.nanovllm_rotate.argtypes = [
        address, c_int32, address, *[size] * 5, address, address, size, size, address, c_float, address,
    ]  # fmt: skip
    lib.nanovllm_store.argtypes = [
        address, c_int32, *[size] * 3, address, size, size, address, size, size, address, size, c_int32, address,
        address,
    ]  # fmt: skip
    lib.nanovllm_attention.argtypes = [
        address, c_int32, address, *[size] * 5, c_int32, address, address, *[size] * 4, address, size, size, address,
        size, address, size, c_float, size, c_float, address,
    ]  # fmt: skip
    for name in ("rms_norm", "silu_and_mul", "rotate", "store", "attention"):
        getattr(lib, f"nanovllm_{name}").errcheck = checked
    return lib


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [..., size] as rows that have one stride, copied if they have not, and the stride in elements."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def _address(name: str, weight: torch.Tensor, size: int) -> int:
    """Of a contiguous weight [size]."""
    if weight.shape != (size,):
        raise ValueError(f"{name}: expected [{size}], not {list(weight.shape)}")
    return weight.data_ptr()


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], copied if the numbers of a head are not side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The op `rms_norm`."""
    size, weight = x.shape[-1], weight.contiguous()
    out = _empty_like(x)
    if rows := out.numel() // max(1, size):
        x, stride = _rows(x)
        _library().nanovllm_rms_norm(
            threads(), _FORMATS[x.dtype], x.data_ptr(), stride, None, 0, _address("weight", weight, size), rows, size,
            eps, None, out.data_ptr(),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `add_rms_norm`. No memory is reused."""
    if residual.shape != x.shape:
        raise ValueError(f"residual: expected {list(x.shape)}, not {list(residual.shape)}")
    size, weight = x.shape[-1], weight.contiguous()
    out, total = _empty_like(x), _empty_like(x)
    if rows := out.numel() // max(1, size):
        (x, stride), (residual, residual_stride) = _rows(x), _rows(residual)
        _library().nanovllm_rms_norm(
            threads(), _FORMATS[x.dtype], x.data_ptr(), stride, residual.data_ptr(), residual_stride,
            _address("weight", weight, size), rows, size, eps, total.data_ptr(), out.data_ptr(),
        )  # fmt: skip
    return out, total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The op `silu_and_mul`."""
    *leading, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up: expected [..., 2*n], not {list(gate_up.shape)}")
    size = width // 2
    out = gate_up.new_empty(*leading, size)
    if rows := out.numel() // max(1, size):
        gate_up, stride = _rows(gate_up)
        _library().nanovllm_silu_and_mul(
            threads(), _FORMATS[gate_up.dtype], gate_up.data_ptr(), stride, rows, size, out.data_ptr()
        )
    return out


def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `rotary_embedding`."""
    return (
        _rotated("q", q, None, 0.0, positions, cos_sin_cache),
        _rotated("k", k, None, 0.0, positions, cos_sin_cache),
    )


def qk_norm_rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `qk_norm_rope`."""
    return (
        _rotated("q", q, q_weight, eps, positions, cos_sin_cache),
        _rotated("k", k, k_weight, eps, positions, cos_sin_cache),
    )


def _rotated(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> torch.Tensor:
    """x [tokens, heads, head_dim], the argument `name`, rotated; if there is a weight, after the norm of every head."""
    tokens, heads, dim = x.shape
    if dim % 2:
        raise ValueError(f"{name}: head_dim must be even, not {dim}")
    if positions.shape != (tokens,) or positions.dtype is not torch.int64 or cos_sin_cache.shape[1] != dim:
        raise ValueError(
            f"positions, cos_sin_cache: expected int64 [{tokens}] and [max_position, {dim}], as {name} has, not"
            f" {positions.dtype} {list(positions.shape)} and {list(cos_sin_cache.shape)}"
        )
    x, positions = _heads(x), positions.contiguous()
    if cos_sin_cache.stride(1) != 1:
        cos_sin_cache = cos_sin_cache.contiguous()
    if weight is not None:
        weight = weight.contiguous()
    out = _empty_like(x)
    wrong = _library().nanovllm_rotate(
        threads(), _FORMATS[x.dtype], x.data_ptr(), tokens, heads, dim, x.stride(0), x.stride(1), positions.data_ptr(),
        cos_sin_cache.data_ptr(), cos_sin_cache.stride(0), cos_sin_cache.shape[0],
        None if weight is None else _address(f"{name}_weight", weight, dim), eps, out.data_ptr(),
    )  # fmt: skip
    if wrong:
        check_positions(positions, cos_sin_cache)
        raise AssertionError("positions: the library found one that is out of range")
    return out


def store_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """The op `store_kvcache`. Caches are contiguous and have no scales."""
    check_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    k, v, slots = _heads(k), _heads(v), slot_mapping.contiguous()
    wrong = _library().nanovllm_store(
        threads(), _FORMATS[k.dtype], *k.shape, k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0),
        v.stride(1), slots.data_ptr(), k_cache.shape[0] * k_cache.shape[1], _FORMATS[k_cache.dtype], k_cache.data_ptr(),
        v_cache.data_ptr(),
    )  # fmt: skip
    if wrong:
        check_slots(slots, k_cache)
        raise AssertionError("slot_mapping: the library found a slot that is out of range")


def attention_decode(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> torch.Tensor:
    """The op `attention_decode`. Caches are contiguous and have no scales; head_dim is a multiple of 16."""
    check_attention(q, kv, scale, window, soft_cap)
    queries = q.shape[0] // kv.num_seqs if kv.num_seqs else 1
    out = _empty_like(q)
    if not queries or _attend(q, kv, None, queries, scale, window, soft_cap, out):
        check_query_tokens(q, kv, scale, window, soft_cap)
        raise AssertionError("attention_decode: the library found lengths or blocks that are out of range")
    return out


def attention_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The op `attention_prefill`, as `attention_decode`."""
    out = _empty_like(q)
    starts = cu_seqlens_q
    fits = starts.dtype is torch.int32 and starts.shape == (kv.num_seqs + 1,) and starts.is_contiguous()
    check_attention(q, kv, scale, window, soft_cap)
    if not fits or _attend(q, kv, starts, max_query_len, scale, window, soft_cap, out):
        check_prefill(q, kv, starts, max_query_len, scale, window, soft_cap)
        raise AssertionError("attention_prefill: the library found runs, lengths or blocks that are out of range")
    return out


def _attend(
    q: torch.Tensor,
    kv: PagedKV,
    starts: torch.Tensor | None,
    queries: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: torch.Tensor,
) -> int:
    """Fill `out`; not 0: lengths, blocks or runs are out of range, and nothing is written."""
    q, cache = _heads(q), kv.k_cache
    tokens, heads, dim = q.shape
    return _library().nanovllm_attention(
        threads(), _FORMATS[q.dtype], q.data_ptr(), tokens, heads, dim, q.stride(0), q.stride(1), _FORMATS[cache.dtype],
        cache.data_ptr(), kv.v_cache.data_ptr(), *cache.shape[:3], kv.num_seqs, kv.block_table.data_ptr(),
        kv.block_table.stride(0), kv.block_table.shape[1], kv.context_lens.data_ptr(), kv.max_context_len,
        None if starts is None else starts.data_ptr(), queries, scale, window or 0, soft_cap or 0.0, out.data_ptr(),
    )  # fmt: skip
