"""Three sequences, and an empty paged cache for them."""

import torch

from nanovllm.layers.attention import LayerCache

LENS, BLOCK, HEADS, KV_HEADS, DIM = [1, 17, 40], 16, 4, 2, 8


def batch(dtype=torch.float64, cache_dtype=None, seed=0):
    """(q, k, v of every token, an empty cache of NaN, block table): sequences of LENS tokens."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENS)
    q, k, v = (torch.randn(n, h, DIM, generator=g, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    cache = LayerCache(
        *(torch.full((10, BLOCK, KV_HEADS, DIM), float("nan")).to(cache_dtype or dtype) for _ in range(2))
    )
    table = torch.randperm(10, generator=g)[:9].view(3, 3).int()
    return q, k, v, cache, table


def slots(table):
    return torch.cat(
        [table[i].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for i, n in enumerate(LENS)]
    )
