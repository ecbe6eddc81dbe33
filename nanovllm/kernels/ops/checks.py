"""What the attention and cache ops ask of their arguments.

`check_attention` and `check_store` look at shapes, dtypes and strides, which the host knows: they cost a few microseconds and are
always on. `check_attention_values` and `check_slots` look at what block tables, lengths and slots say, which only the device
knows: they wait for it, so they run only with NANOVLLM_CHECK=1, and not while a CUDA graph is being captured.
"""

from __future__ import annotations

import math
import os

import torch

ENVIRONMENT_VARIABLE = "NANOVLLM_CHECK"
FP8 = torch.float8_e4m3fn


def values_checked(device: torch.device) -> bool:
    """Whether this call is to check what it can only learn from the device."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "") in ("", "0"):
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int | None, head_dim: int) -> None:
    """ValueError unless K and V are caches [num_blocks, block_size, num_kv_heads, head_dim] alike in shape, dtype and strides."""
    if k_cache.dim() != 4 or k_cache.shape[3] != head_dim or num_kv_heads not in (None, k_cache.shape[2]):
        heads = "num_kv_heads" if num_kv_heads is None else num_kv_heads
        raise ValueError(
            f"k_cache: expected [num_blocks, block_size, {heads}, {head_dim}], got {list(k_cache.shape)}; the layout is "
            "blocks, then slots, then heads"
        )
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or v_cache.stride() != k_cache.stride():
        raise ValueError(
            f"v_cache: expected shape, dtype and strides of k_cache, {_describe(k_cache)}, got {_describe(v_cache)}"
        )
    if k_cache.stride(3) != 1:
        raise ValueError(f"k_cache: expected a stride of 1 in head_dim, got {_describe(k_cache)}")
    if not k_cache.dtype.is_floating_point or (k_cache.dtype.itemsize == 1 and k_cache.dtype != FP8):
        raise ValueError(f"k_cache: expected float8_e4m3fn, float16, bfloat16, float32 or float64, got {k_cache.dtype}")


def check_scale(scale: torch.Tensor | None, name: str, num_kv_heads: int) -> None:
    if scale is None:
        return
    if scale.dtype != torch.float32 or scale.shape not in ((1,), (num_kv_heads,)) or not scale.is_contiguous():
        raise ValueError(f"{name}: expected contiguous float32 of shape [1] or [{num_kv_heads}], got {_describe(scale)}")


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """ValueError, naming the argument, for what no provider of the attention ops can take."""
    if q.dim() != 3:
        raise ValueError(f"q: expected [num_tokens, num_heads, head_dim], got {list(q.shape)}")
    check_caches(k_cache, v_cache, None, q.shape[2])
    num_kv_heads = k_cache.shape[2]
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"q: expected a multiple of the cache's {num_kv_heads} heads, got {q.shape[1]} heads")
    num_seqs = context_lens.shape[0]
    if context_lens.dtype != torch.int32 or context_lens.dim() != 1 or not context_lens.is_contiguous():
        raise ValueError(f"context_lens: expected contiguous int32 [num_seqs], got {_describe(context_lens)}")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != num_seqs:
        raise ValueError(f"block_table: expected int32 [{num_seqs}, max_blocks], got {_describe(block_table)}")
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: expected adjacent columns, got strides {block_table.stride()}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected None or at least 1 token, got {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap: expected None or a positive finite number, got {soft_cap}")
    check_scale(k_scale, "k_scale", num_kv_heads)
    check_scale(v_scale, "v_scale", num_kv_heads)


def check_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """ValueError, naming the argument, for what no provider of `store_kvcache` can take."""
    if k.dim() != 3 or v.shape != k.shape:
        raise ValueError(
            f"k, v: expected [num_tokens, num_kv_heads, head_dim] alike, got {list(k.shape)} and {list(v.shape)}"
        )
    check_caches(k_cache, v_cache, k.shape[1], k.shape[2])
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping: expected int64 [{k.shape[0]}], got {_describe(slot_mapping)}")
    check_scale(k_scale, "k_scale", k.shape[1])
    check_scale(v_scale, "v_scale", k.shape[1])


def check_new_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> None:
    """ValueError unless there is one new key and value for each query token, and a norm for both q and k or for none."""
    expected = (q.shape[0], *k_cache.shape[2:])
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k, v: expected {list(expected)}, got {list(k.shape)} and {list(v.shape)}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight, k_weight: expected both or neither, got one")


def check_attention_values(
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int | None = None,
    query_lens: torch.Tensor | None = None,
) -> None:
    """ValueError naming the sequence and block where a length or block is out of range. Waits for the device.

    Args:
        max_context_len: the bound that was given for context_lens, if one was.
        query_lens: [num_seqs], how many tokens of each sequence are queries; a sequence of none may have any length.
    """
    num_blocks, block_size = k_cache.shape[:2]
    table, lens = block_table.cpu(), context_lens.cpu().long()
    room = table.shape[1] * block_size
    bound = room if max_context_len is None else min(room, max_context_len)
    for i in ((lens < 0) | (lens > bound)).nonzero().flatten().tolist():
        what = f"max_context_len={max_context_len}" if bound < room else f"{table.shape[1]} blocks of {block_size}"
        raise ValueError(f"context_lens: sequence {i} has length {lens[i]}, expected 0 to {bound} ({what})")
    if query_lens is not None:
        short = (lens < query_lens.cpu()).nonzero().flatten().tolist()
        for i in short:
            raise ValueError(
                f"context_lens: sequence {i} has length {lens[i]}, shorter than its {query_lens[i]} query tokens"
            )
    used = torch.arange(table.shape[1]) * block_size < lens[:, None]
    for i, j in (used & ((table < 0) | (table >= num_blocks))).nonzero().tolist():
        raise ValueError(
            f"block_table: sequence {i} has block {table[i, j]} in column {j}, expected 0 to {num_blocks - 1} "
            f"(tokens {j * block_size} to {min((j + 1) * block_size, int(lens[i])) - 1} of {lens[i]})"
        )


def check_slots(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> None:
    """ValueError naming the token whose slot is outside of the cache. Waits for the device."""
    slots = k_cache.shape[0] * k_cache.shape[1]
    for i in ((slot_mapping < 0) | (slot_mapping >= slots)).nonzero().flatten().tolist():
        slot = int(slot_mapping[i])
        raise ValueError(
            f"slot_mapping: token {i} has slot {slot} (block {slot // k_cache.shape[1]}), expected 0 to {slots - 1} "
            f"({k_cache.shape[0]} blocks of {k_cache.shape[1]})"
        )


def _describe(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())}"
