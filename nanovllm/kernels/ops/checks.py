"""What the attention and cache ops ask of their arguments.

Shapes, dtypes and strides are known to the host. To check them costs a few microseconds, and they are always checked.
The values in block tables, lengths, positions, slots, token ids and sampling parameters are checked where
`values_checked` says so: always on a CPU. A CUDA tensor's values are known to the device only, and a check has to wait
for it. So there they are checked only with NANOVLLM_CHECK=1, and not while a CUDA graph is being captured.
"""

from __future__ import annotations

import math
import os

import torch

from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV
from nanovllm.wording import counted

ENVIRONMENT_VARIABLE = "NANOVLLM_CHECK"
FP8 = torch.float8_e4m3fn


def values_checked(device: torch.device) -> bool:
    """Whether this call is to check the values of tensors: always on a CPU, on request where that means waiting for
    the device.
    """
    if torch.compiler.is_compiling():
        return False  # tensors without values
    if device.type == "cpu":
        return True
    if os.environ.get(ENVIRONMENT_VARIABLE, "") in ("", "0"):
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int | None, head_dim: int) -> None:
    """ValueError unless K and V are caches [num_blocks, block_size, num_kv_heads, head_dim] alike in shape, dtype
    and strides.
    """
    if k_cache.dim() != 4 or k_cache.shape[3] != head_dim or num_kv_heads not in (None, k_cache.shape[2]):
        heads = "num_kv_heads" if num_kv_heads is None else num_kv_heads
        raise ValueError(
            f"k_cache: expected [num_blocks, block_size, {heads}, {head_dim}], got {list(k_cache.shape)}; the layout "
            "is blocks, then slots, then heads"
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
        raise ValueError(
            f"{name}: expected contiguous float32 of shape [1] or [{num_kv_heads}], got {_describe(scale)}"
        )
    if values_checked(scale.device) and not (scale > 0).all():
        raise ValueError(f"{name}: expected positive numbers, got {scale.tolist()}")


def check_attention(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> None:
    """ValueError, naming the argument, for what no attention op takes, however many query tokens a sequence has."""
    if q.dim() != 3:
        raise ValueError(f"q: expected [num_tokens, num_heads, head_dim], got {list(q.shape)}")
    check_caches(kv.k_cache, kv.v_cache, None, q.shape[2])
    if not kv.num_kv_heads:
        raise ValueError(f"k_cache: expected at least one KV head, got {list(kv.k_cache.shape)}")
    if q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"q: expected a multiple of the cache's {kv.num_kv_heads} heads, got {q.shape[1]}")
    lens, table = kv.context_lens, kv.block_table
    if lens.dtype != torch.int32 or lens.dim() != 1 or not lens.is_contiguous():
        raise ValueError(f"context_lens: expected contiguous int32 [num_seqs], got {_describe(lens)}")
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != kv.num_seqs:
        raise ValueError(f"block_table: expected int32 [{kv.num_seqs}, max_blocks], got {_describe(table)}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"block_table: expected adjacent columns, got strides {table.stride()}")
    if window is not None and (not isinstance(window, int) or not 0 < window < 1 << 30):
        raise ValueError(f"window: expected None or a whole number of tokens from 1 to 2**30 - 1, got {window}")
    if not 0 < scale < math.inf:  # kernels take the largest score before they scale it
        raise ValueError(f"scale: expected a positive finite number, got {scale}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap: expected None or a positive finite number, got {soft_cap}")
    check_scale(kv.k_scale, "k_scale", kv.num_kv_heads)
    check_scale(kv.v_scale, "v_scale", kv.num_kv_heads)


def check_decode(
    q: torch.Tensor,
    kv: PagedKV,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    new: NewTokens | None = None,
) -> None:
    """ValueError, naming the argument, for shapes that no provider of an op of one query token a sequence can take.

    new: for an op that gets the queries as they are projected, with one new key and value for each.
    """
    check_attention(q, kv, scale, window, soft_cap)
    if q.shape[0] != kv.num_seqs:
        raise ValueError(
            f"q: expected [{kv.num_seqs}, num_heads, head_dim], a query token for each sequence of context_lens and "
            f"block_table, got {list(q.shape)}"
        )
    if new is not None:
        expected = (q.shape[0], *kv.k_cache.shape[2:])
        if new.k.shape != expected or new.v.shape != expected:
            raise ValueError(f"k, v: expected {list(expected)}, got {list(new.k.shape)} and {list(new.v.shape)}")
        if (new.q_weight is None) != (new.k_weight is None):
            raise ValueError("q_weight, k_weight: expected both or neither, got one")


def check_query_tokens(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> int:
    """The query tokens of each sequence.

    ValueError, naming the argument, for what no provider of `attention_decode` can take.
    """
    check_attention(q, kv, scale, window, soft_cap)
    num_tokens, num_seqs = q.shape[0], kv.num_seqs
    if num_tokens != num_seqs and (not num_seqs or not num_tokens or num_tokens % num_seqs):
        raise ValueError(
            f"q: expected [n * {num_seqs}, num_heads, head_dim], the same number n of query tokens, at least 1, for "
            f"each of the {num_seqs} sequences of context_lens and block_table, got {list(q.shape)}"
        )
    if values_checked(q.device):
        check_attention_values(kv)
    return num_tokens // num_seqs if num_seqs else 1


def check_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """ValueError, naming the argument, for what no provider of `attention_prefill` can take."""
    check_attention(q, kv, scale, window, soft_cap)
    shape = (kv.num_seqs + 1,)
    if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_q.shape != shape or not cu_seqlens_q.is_contiguous():
        raise ValueError(
            f"cu_seqlens_q: expected contiguous int32 {list(shape)}, got {cu_seqlens_q.dtype}"
            f" {list(cu_seqlens_q.shape)}"
        )
    if values_checked(q.device):
        _check_runs(q, kv, cu_seqlens_q, max_query_len)


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


def check_attention_values(kv: PagedKV, *, least: int = 0, positions: int | None = None) -> None:
    """ValueError naming the sequence and block where a length or block is out of range. Waits for the device.

    Args:
        least: the least length that the op takes; 0 where a sequence without tokens is padding.
        positions: rows of cos_sin_cache, if the last token of each sequence is rotated.
    """
    num_blocks, block_size = kv.k_cache.shape[:2]
    table, lens = kv.block_table.cpu(), kv.context_lens.cpu()
    room = table.shape[1] * block_size
    bound, what = room, f"{counted(table.shape[1], 'block')} of {block_size} in block_table"
    if kv.max_context_len < bound:
        bound, what = kv.max_context_len, f"max_context_len={kv.max_context_len}"
    if positions is not None and positions < bound:
        bound, what = positions, f"{positions} positions in cos_sin_cache"
    for i, length in enumerate(lens.tolist()):
        if not least <= length <= bound:
            raise ValueError(f"context_lens: sequence {i} has length {length}, expected {least} to {bound} ({what})")
    wrong = (table < 0) | (table >= num_blocks)
    if not wrong.any():
        return
    used = torch.arange(table.shape[1]) * block_size < lens[:, None]
    for i, j in (used & wrong).nonzero().tolist():
        raise ValueError(
            f"block_table: sequence {i} has block {table[i, j]} in column {j}, expected 0 to {num_blocks - 1} "
            f"(tokens {j * block_size} to {min((j + 1) * block_size, int(lens[i])) - 1} of {lens[i]})"
        )


def _check_runs(q: torch.Tensor, kv: PagedKV, cu_seqlens_q: torch.Tensor, max_query_len: int) -> None:
    """As `check_attention_values`, and for runs of queries that do not fit q, max_query_len or the lengths.

    A sequence without queries may have any length. A sequence without tokens is padding, and may have any queries.
    """
    starts = cu_seqlens_q.tolist()
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens_q: expected 0 as the start of the first run, got {starts[0]}")
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
        if end < start:
            raise ValueError(
                f"cu_seqlens_q: sequence {i} ends at token {end}, expected at least {start}, where it starts"
            )
    if starts[-1] != q.shape[0]:
        raise ValueError(
            f"cu_seqlens_q: sequence {len(starts) - 2} ends at token {starts[-1]}, expected {q.shape[0]}, the tokens"
            f" of q"
        )
    check_attention_values(kv)
    for i, (start, end, length) in enumerate(zip(starts, starts[1:], kv.context_lens.tolist())):
        if end - start > max_query_len:
            raise ValueError(
                f"max_query_len: expected at least {end - start}, the query tokens of sequence {i}, got {max_query_len}"
            )
        if 0 < length < end - start:
            raise ValueError(
                f"context_lens: sequence {i} has length {length}, shorter than its {end - start} query tokens"
            )


def check_positions(positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """ValueError naming the token whose position has no row in cos_sin_cache. Waits for the device."""
    rows = cos_sin_cache.shape[0]
    wrong = (positions < 0) | (positions >= rows)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"positions: token {i} has position {int(positions[i])}, expected 0 to {rows - 1}, the rows of"
            f" cos_sin_cache"
        )


def check_slots(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> None:
    """ValueError naming the token whose slot is outside of the cache. Waits for the device."""
    slots = k_cache.shape[0] * k_cache.shape[1]
    wrong = (slot_mapping < 0) | (slot_mapping >= slots)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        slot = int(slot_mapping[i])
        raise ValueError(
            f"slot_mapping: token {i} has slot {slot} (block {slot // k_cache.shape[1]}), expected 0 to {slots - 1} "
            f"({counted(k_cache.shape[0], 'block')} of {k_cache.shape[1]})"
        )


def check_token_ids(token_ids: torch.Tensor, vocab_size: int) -> None:
    """ValueError naming the token whose id has no row in the table. Waits for the device."""
    wrong = (token_ids < 0) | (token_ids >= vocab_size)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"token_ids: token {i} has id {int(token_ids[i])}, expected 0 to {vocab_size - 1}, the rows of weight"
        )


def check_sampling(temperature: torch.Tensor, top_p: torch.Tensor | None, min_p: torch.Tensor | None) -> None:
    """ValueError naming the row whose temperature, top_p or min_p is out of range or NaN. Waits for the device."""
    for name, values, high in (("temperature", temperature, math.inf), ("top_p", top_p, 1.0), ("min_p", min_p, 1.0)):
        if values is None or ((values >= 0) & (values <= high)).all():
            continue
        i = int((~((values >= 0) & (values <= high))).nonzero()[0])
        expected = "at least 0" if high == math.inf else f"0 to {high:g}"
        raise ValueError(f"{name}: row {i} has {float(values[i])}, expected {expected}")


def _describe(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} with strides {list(x.stride())}"
