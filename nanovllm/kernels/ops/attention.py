"""Attention over the paged KV cache: of one or a few query tokens a sequence, and of runs of query tokens.

The cache is described by `PagedKV`.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.attention_inputs import FEW, PREFILL
from nanovllm.kernels.ops.checks import check_prefill, check_query_tokens
from nanovllm.kernels.ops.paged_kv import PagedKV

# The reference gathers a sequence's blocks into contiguous memory, in pieces of about this size. So a large batch or a
# long prompt needs no more memory.
_PIECE_BYTES = 256 * 2**20


@op(**FEW)
def attention_decode(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> torch.Tensor:
    """The last token of each sequence, or the last n of each, against all of its cached tokens, its own included.

    n is the same for all sequences: q.shape[0] / num_seqs, at least 1. Query i of n stands at position context_len - n
    + i and sees the tokens up to its own. This op is for few query tokens, such as a draft to be verified: contexts are
    split over the GPU, and every cached token is read once for all n. Many query tokens, or a different number for each
    sequence, are for `attention_prefill` ("A few query tokens" in docs/attention.md).

    Source: Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023.

    Args:
        q: [num_seqs * n, num_heads, head_dim], any float dtype: all queries of one sequence, then those of the next.
        kv: the cache. Lengths count the n query tokens. A sequence of length 0 gets zeros. One of a length below n gets
            zeros for its first queries, which stand before its first token.
        scale: multiplies q @ k.
        window: if given, a query attends to the last `window` tokens up to its own, which counts as one of them.
        soft_cap: if given, a score s, scale included, becomes soft_cap * tanh(s / soft_cap).

    Returns:
        [num_seqs * n, num_heads, head_dim], the dtype of q. Cache slots beyond context_lens never influence it, NaN or
        not.

    Raises:
        ValueError: arguments do not fit together. Lengths and blocks are checked on a CPU, elsewhere with
            NANOVLLM_CHECK=1.
    """
    queries = check_query_tokens(q, kv, scale, window, soft_cap)
    compute = _decode_one_by_one if q.device.type == "cpu" else decode_padded
    return compute(q, kv, queries, scale, window, soft_cap)


def decode_padded(q, kv: PagedKV, n: int, scale, window, soft_cap, piece_bytes: int = _PIECE_BYTES) -> torch.Tensor:
    """`attention_decode` with shapes that follow from host values alone, so that a CUDA graph can be captured."""
    head_dim = q.shape[2]
    num_kv_heads, block_size, longest = kv.num_kv_heads, kv.block_size, kv.max_context_len
    group = q.shape[1] // num_kv_heads
    positions = torch.arange(longest, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    back = torch.arange(n - 1, -1, -1, device=q.device)
    wide = _working_dtype(q, kv)
    rows = max(1, piece_bytes // max(1, longest * num_kv_heads * head_dim * q.element_size()))
    for start in range(0, kv.num_seqs, rows):
        piece = slice(start, start + rows)
        tokens = slice(start * n, (start + rows) * n)
        lens = kv.context_lens[piece, None]
        ends = (lens - back)[..., None]  # [rows, n, 1]: what a query sees ends there
        valid = positions < ends  # [rows, n, longest]
        if window is not None:
            valid &= positions >= ends - window
        # Masked scores do not keep a NaN out (0 * NaN is NaN), so dead positions read the sequence's last token
        # instead.
        read = torch.where(valid[:, 0] if n == 1 else valid.any(1), positions, (lens - 1).clamp_min(0))
        slots = kv.block_table[piece].gather(1, read // block_size).long() * block_size + read % block_size
        # [rows, num_kv_heads, longest, head_dim]
        k = _dequantised(_gather(kv.k_cache, slots).transpose(1, 2), kv.k_scale, wide)
        v = _dequantised(_gather(kv.v_cache, slots).transpose(1, 2), kv.v_scale, wide)
        # The query heads that share a KV head are treated as that head's query tokens: K and V are not repeated.
        mask = valid if n == 1 else valid.repeat_interleave(group, 1)
        o = _attend(_grouped(q[tokens].to(wide), n, num_kv_heads), k, v, mask[:, None], scale, soft_cap)
        # A query that sees nothing is of a sequence that may have read a slot that holds anything.
        out[tokens] = _ungrouped(o, n).masked_fill(ends.view(-1, 1, 1) <= 0, 0)
    return out


def _grouped(q, n, num_kv_heads) -> torch.Tensor:
    """q [num_seqs * n, num_heads, head_dim] -> [num_seqs, num_kv_heads, n * (num_heads // num_kv_heads), head_dim]."""
    heads = q.unflatten(1, (num_kv_heads, -1)).unflatten(0, (-1, n))
    return heads.transpose(1, 2).flatten(2, 3)


def _ungrouped(o, n) -> torch.Tensor:
    """The inverse of `_grouped`."""
    return o.unflatten(2, (n, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _decode_one_by_one(q, kv: PagedKV, n: int, scale, window, soft_cap) -> torch.Tensor:
    # On a CPU lengths cost nothing to read, so no sequence is padded to the longest one.
    out = torch.zeros(q.shape, dtype=q.dtype)
    wide = _working_dtype(q, kv)
    group = q.shape[1] // kv.num_kv_heads
    grouped = _grouped(q.to(wide), n, kv.num_kv_heads)
    for i, length in enumerate(kv.context_lens.tolist()):
        if length > 0:
            first = 0 if window is None else max(0, length - (n - 1) - window)
            k, v = _sequence(kv, i, first, length, wide)
            mask = None if n == 1 else _seen(n, first, length, window).repeat_interleave(group, 0)
            o = _attend(grouped[i], k, v, mask, scale, soft_cap)
            # All but the queries before the first token.
            out[(i + 1) * n - min(n, length) : (i + 1) * n] = _ungrouped(o[None], n)[-min(n, length) :]
    return out


def _seen(n: int, first: int, length: int, window: int | None) -> torch.Tensor:
    """Which of the tokens [first, length) each of the last n sees: [n, length - first]."""
    tokens, positions = torch.arange(first, length), torch.arange(length - n, length)[:, None]
    mask = tokens <= positions
    return mask if window is None else mask & (tokens > positions - window)


@op(**PREFILL, native_capturable=False)  # the reference reads the runs' lengths on the host
def attention_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Runs of query tokens, each causal over its own sequence: new prompts, cached prefixes, chunks of long prompts.

    Args:
        q: [num_tokens, num_heads, head_dim], any float dtype: each sequence's last tokens, one run after the other.
        kv: the cache, the new tokens already stored.
        cu_seqlens_q: [num_seqs + 1] int32, contiguous: where each run starts in q, and where the last one ends.
        max_query_len: a host-side bound on the runs' lengths, from which tile sizes may follow.
        scale, window, soft_cap: as in `attention_decode`.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of q; zeros for a query that sees nothing (context_len 0). The
        reference reads the lengths on the host, and on CUDA waits for them.

    Raises:
        ValueError: arguments do not fit together. Runs, lengths and blocks are checked on a CPU, elsewhere with
            NANOVLLM_CHECK=1.
    """
    check_prefill(q, kv, cu_seqlens_q, max_query_len, scale, window, soft_cap)
    return prefill_one_by_one(q, kv, cu_seqlens_q, scale, window, soft_cap)


def prefill_one_by_one(q, kv: PagedKV, cu_seqlens_q, scale, window, soft_cap, piece_bytes=_PIECE_BYTES) -> torch.Tensor:
    """`attention_prefill`, one sequence at a time, with masks of about `piece_bytes`."""
    group = q.shape[1] // kv.num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide = _working_dtype(q, kv)
    starts = cu_seqlens_q.tolist()
    for i, length in enumerate(kv.context_lens.tolist()):
        run = slice(starts[i], starts[i + 1])
        # [num_heads, length, head_dim]
        k, v = (x.repeat_interleave(group, 0) for x in _sequence(kv, i, 0, length, wide))
        _prefill_one(
            q[run].to(wide).transpose(0, 1), k, v, out[run].transpose(0, 1), scale, window, soft_cap, piece_bytes
        )
    return out


def _prefill_one(q, k, v, out, scale, window, soft_cap, piece_bytes) -> None:
    """One sequence: q, out [num_heads, num_new, head_dim]; k, v [num_heads, length, head_dim]."""
    num_heads, num_new, _ = q.shape
    length = k.shape[1]
    # In float64 torch has only the form whose scores are in memory, all at once.
    if num_new == length and window is None and soft_cap is None and q.dtype != torch.float64:
        out[:] = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
        return
    tokens = torch.arange(length, device=q.device)
    # In pieces, since the mask is dense.
    rows = max(1, piece_bytes // (4 * num_heads * max(1, length)))
    for j in range(0, num_new, rows):
        piece = q[:, j : j + rows]
        # Query j of the run stands at position length - num_new + j.
        positions = torch.arange(piece.shape[1], device=q.device)[:, None] + (length - num_new + j)
        mask = tokens <= positions
        if window is not None:
            mask &= tokens > positions - window
        out[:, j : j + rows] = _attend(piece, k, v, mask, scale, soft_cap).masked_fill(positions < 0, 0)


def _attend(q, k, v, mask, scale, soft_cap) -> torch.Tensor:
    """softmax(q k^T) v over [..., heads, tokens, head_dim], where `mask`, broadcast, is True."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # Not rounded before the cap, nor is what follows: large scores in 16 bits are off by whole units.
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (t.to(wide) for t in (q, k, v))
    scores = (q @ k.mT) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).to(dtype)


def _sequence(kv: PagedKV, i: int, first: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tokens [first, end) of sequence i, in `dtype`: [num_kv_heads, end - first, head_dim]."""
    skipped = first // kv.block_size
    blocks = kv.block_table[i, skipped : -(-end // kv.block_size)]

    def read(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        tokens = _bits(cache).index_select(0, blocks).view(cache.dtype).flatten(0, 1)
        tokens = tokens[first - skipped * kv.block_size : end - skipped * kv.block_size]
        return _dequantised(tokens.transpose(0, 1), scale, dtype)

    return read(kv.k_cache, kv.k_scale), read(kv.v_cache, kv.v_scale)


def _gather(cache, slots) -> torch.Tensor:
    """[*slots, num_kv_heads, head_dim]"""
    return _bits(cache).flatten(0, 1)[slots].view(cache.dtype)


def _bits(cache) -> torch.Tensor:
    # Not every indexing function knows the 8-bit floats.
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _working_dtype(q: torch.Tensor, kv: PagedKV) -> torch.dtype:
    """What is computed in: products with a scale are not rounded to 16 bits."""
    return q.dtype if kv.k_scale is None and kv.v_scale is None else torch.promote_types(q.dtype, torch.float32)


def _dequantised(x, scale, dtype) -> torch.Tensor:
    """x [..., num_kv_heads, tokens, head_dim] times scale [1] or [num_kv_heads], in `dtype`."""
    if scale is None:
        return x.to(dtype)
    return (x.to(torch.promote_types(dtype, torch.float32)) * scale[:, None, None]).to(dtype)
