"""Attention over the paged KV cache: one query token a sequence, and runs of query tokens.

The cache layout is [num_blocks, block_size, num_kv_heads, head_dim] for K and for V; a sequence's token t lies in
block `block_table[t // block_size]` at offset `t % block_size`. Query head h reads KV head h // (num_heads / num_kv_heads).
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.registry import op

# The reference gathers a sequence's blocks into contiguous memory; it works in pieces of about this size so that a large
# batch or a long prompt needs no more.
_PIECE_BYTES = 256 * 2**20


@op
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    """One query token a sequence against all of that sequence's cached tokens (its own among them).

    Args:
        q: [num_seqs, num_heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's last block may be any valid block.
        context_lens: [num_seqs] int32, at least 1.
        max_context_len: a host-side bound on context_lens; the work is sized by it, so that a CUDA graph can be captured.
        scale: multiplies q @ k.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q. Cache slots beyond context_lens never influence it, NaN or not.
    """
    if q.device.type == "cpu":
        return _decode_one_by_one(q, k_cache, v_cache, block_table, context_lens.tolist(), scale)
    return _decode_padded(q, k_cache, v_cache, block_table, context_lens, max_context_len, scale)


def _decode_padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
) -> torch.Tensor:
    # Every shape follows from shapes and host values, so that a CUDA graph can be captured.
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    positions = torch.arange(max_context_len, device=q.device)
    out = torch.empty_like(q)
    rows = max(1, _PIECE_BYTES // (max_context_len * num_kv_heads * head_dim * q.element_size()))
    for start in range(0, num_seqs, rows):
        piece = slice(start, start + rows)
        valid = positions < context_lens[piece, None]  # [rows, max_context_len]
        slots = block_table[piece][:, positions // block_size].long() * block_size + positions % block_size
        # Masked scores do not keep a NaN out (0 * NaN is NaN), so dead positions read the sequence's first token instead.
        slots = torch.where(valid, slots, slots[:, :1])
        # [rows, num_kv_heads, max_context_len, head_dim]
        k, v = (cache.flatten(0, 1)[slots].transpose(1, 2) for cache in (k_cache, v_cache))
        # The query heads that share a KV head are treated as that head's query tokens: K and V are not repeated.
        grouped = q[piece].reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=valid[:, None, None, :], scale=scale)
        out[piece] = o.reshape(-1, num_heads, head_dim)
    return out


def _decode_one_by_one(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    # On a CPU lengths cost nothing to read, so no sequence is padded to the longest one.
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q)
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    for i, length in enumerate(context_lens):
        blocks = block_table[i, : -(-length // block_size)]
        k, v = (cache.index_select(0, blocks).flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        out[i] = F.scaled_dot_product_attention(grouped[i : i + 1], k[None], v[None], scale=scale).view(
            num_heads, head_dim
        )
    return out


@op
def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> torch.Tensor:
    """Runs of query tokens, each causal over its own sequence: new prompts, cached prefixes, chunks of long prompts.

    Args:
        q: [num_tokens, num_heads, head_dim]: the last tokens of each sequence, one run after the other.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the new tokens already stored.
        block_table: [num_seqs, max_blocks] int32.
        cu_seqlens_q: [num_seqs + 1] int32: where each run starts in q, and where the last one ends.
        context_lens: [num_seqs] int32: all tokens of each sequence up to its last query.
        max_query_len: a host-side bound on the runs' lengths, from which tile sizes may follow.
        scale: multiplies q @ k.

    Returns:
        [num_tokens, num_heads, head_dim], the dtype of q. The reference reads the lengths on the host, and on CUDA waits
        for them.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q)
    starts = cu_seqlens_q.tolist()
    for i, length in enumerate(context_lens.tolist()):
        start, num_new = starts[i], starts[i + 1] - starts[i]
        blocks = block_table[i, : -(-length // block_size)]
        # [num_heads, length, head_dim]
        k, v = (
            cache.index_select(0, blocks)
            .flatten(0, 1)[:length]
            .transpose(0, 1)
            .repeat_interleave(num_heads // num_kv_heads, 0)
            for cache in (k_cache, v_cache)
        )
        queries = q[start : start + num_new].transpose(0, 1)
        o = out[start : start + num_new].transpose(0, 1)
        if num_new == length:
            o[:] = F.scaled_dot_product_attention(queries[None], k[None], v[None], is_causal=True, scale=scale)[0]
        else:
            # Query j of the run stands at position length - num_new + j. In pieces, since the mask is dense.
            rows = max(1, _PIECE_BYTES // (4 * num_heads * length))
            for j in range(0, num_new, rows):
                piece = queries[:, j : j + rows]
                end = length - num_new + j + piece.shape[1]
                mask = torch.ones(piece.shape[1], end, dtype=torch.bool, device=q.device).tril(end - piece.shape[1])
                o[:, j : j + rows] = F.scaled_dot_product_attention(
                    piece[None], k[None, :, :end], v[None, :, :end], attn_mask=mask, scale=scale
                )[0]
    return out
