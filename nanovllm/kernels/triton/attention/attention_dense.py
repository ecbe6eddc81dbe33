"""Attention over one tensor of keys and values a batch, by the kernels for the paged cache.

A tensor [batch, num_kv_heads, length, head_dim] is a paged cache already: its slots, counted over the whole batch, have
one stride between tokens and one between heads. Where the length is a multiple of `BLOCK` tokens, it is read in blocks
of that many, in place, by the fastest kernels. Otherwise a decode step reads it in blocks of one token, which are any
tokens, so that padding is left out. A prefill copies keys and values into whole blocks first, which costs little beside
its products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.extra.attention_dense import check_attention_dense
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.triton.attention.decode import attention_decode
from nanovllm.kernels.triton.attention.prefill import attention_prefill

BLOCK = 64
"""Tokens of a block: what the decode kernel for Hopper asks for at least."""
FEW_QUERIES = 8
"""Sequences of at most this number of queries run in the decode kernels, which split long contexts."""


def attention_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    tokens: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The op `attention_dense`. Lengths are read on the device, so that a CUDA graph can be captured and replayed."""
    check_attention_dense(q, k, v, window, soft_cap)
    batch, num_heads, queries, head_dim = q.shape
    if not q.numel() or not k.shape[2]:
        return torch.zeros(batch, queries, num_heads, head_dim, dtype=q.dtype, device=q.device)
    rows = q.transpose(1, 2).reshape(batch * queries, num_heads, head_dim)
    if queries == 1 or (tokens is None and queries <= FEW_QUERIES):
        kv = _in_place(k, v, visible[:, -1].contiguous(), tokens)
        out = attention_decode(rows, kv, scale, window, soft_cap)
    elif tokens is None:
        kv = _in_blocks(k, v, visible[:, -1].contiguous())
        starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=q.device)
        out = attention_prefill(rows, kv, starts, queries, scale, window, soft_cap)
    else:
        out = _padded_prefill(rows, k, v, visible, scale, tokens, window, soft_cap)
    return out.view(batch, queries, num_heads, head_dim)


def _in_place(k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor | None) -> PagedKV:
    """The cache as it lies in memory."""
    k, v = _alike(k, v)
    batch, num_kv_heads, length, head_dim = k.shape
    slot = k.stride(2)
    size = BLOCK if tokens is None and length % BLOCK == 0 else 1
    # Blocks from one sequence to the next. The stride of a single sequence may be any number.
    first = k.stride(0) // slot // size if batch > 1 else length // size
    num_blocks = (batch - 1) * first + length // size

    def view(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((num_blocks, size, num_kv_heads, head_dim), (size * slot, slot, k.stride(1), 1))

    return PagedKV(view(k), view(v), _table(batch, first, length // size, k.device, tokens), lens, length)


def _table(batch: int, first: int, count: int, device: torch.device, tokens: torch.Tensor | None) -> torch.Tensor:
    """The blocks of each sequence: `first` apart from one to the next, and `count`, or those named by `tokens`."""
    if tokens is not None:
        return tokens + torch.arange(0, batch * first, first, dtype=torch.int32, device=device)[:, None]
    # One launch. A table that is kept would be in the memory pool of a CUDA graph.
    return torch.arange(batch * first, dtype=torch.int32, device=device).view(batch, first)[:, :count]


def _in_blocks(k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> PagedKV:
    """The cache in whole blocks, in place if its length is a multiple of them."""
    missing = -k.shape[2] % BLOCK
    if missing:
        k, v = F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing))
    return _in_place(k, v, lens, None)


def _alike(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the same strides, by which slots can be counted over the whole batch."""
    batch, slot = k.shape[0], k.stride(2)
    # The stride of a dimension of size 1 may be any number.
    same = all(a == b for size, a, b in zip(k.shape, k.stride(), v.stride()) if size > 1)
    if not same or k.stride(3) != 1 or slot < 1:
        return _packed(k), _packed(v)
    between = k.stride(0)
    # A multiple of a block, too, where blocks are used: there the length is.
    whole = between % slot == 0 and (k.shape[2] % BLOCK != 0 or between // slot % BLOCK == 0)
    if batch > 1 and not (whole and between >= k.shape[2] * slot):
        return _packed(k), _packed(v)
    return k, v


def _packed(x: torch.Tensor) -> torch.Tensor:
    """A copy whose strides are those of its shape, also in dimensions of size 1, which `contiguous` leaves alone."""
    return x.clone(memory_format=torch.contiguous_format)


def _padded_prefill(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    tokens: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Padding goes to the end of every sequence, and its queries into runs of their own, which see nothing."""
    batch, queries = visible.shape
    order = tokens.long()[:, None, :, None]
    k, v = (x.gather(2, order.expand(x.shape)) for x in (k, v))
    padding = visible == 0
    # [batch, queries]: the rows of real queries, then of padding
    arranged = torch.argsort(padding, dim=1, stable=True)
    starts = torch.arange(0, batch * queries, queries, device=rows.device)[:, None]
    arranged = (starts + arranged).flatten()
    real = queries - padding.sum(1, dtype=torch.int32)
    lens = torch.stack((visible.amax(1), torch.zeros_like(real)), 1).flatten()
    ends = torch.stack((starts[:, 0].int() + real, starts[:, 0].int() + queries), 1).flatten()
    cu_seqlens = F.pad(ends, (1, 0))
    kv = _in_blocks(k, v, lens)
    kv = PagedKV(kv.k_cache, kv.v_cache, kv.block_table.repeat_interleave(2, 0), lens, kv.max_context_len)
    out = attention_prefill(rows[arranged], kv, cu_seqlens.int(), queries, scale, window, soft_cap)
    return torch.empty_like(out).index_copy_(0, arranged, out)
