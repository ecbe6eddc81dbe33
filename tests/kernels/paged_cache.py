"""A paged cache in which everything is poisoned that nobody may read."""

import torch


def paged(lens, num_kv_heads, head_dim, block_size, dtype, seed=0, scale=1.0, device="cpu"):
    """(k_cache, v_cache, block_table): shuffled blocks, NaN wherever no token is, a table wider than needed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [max(1, -(-n // block_size)) for n in lens]
    num_blocks = sum(blocks) + 3
    shuffled = torch.randperm(num_blocks, generator=generator)
    table = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for i, n in enumerate(blocks):
        mine, shuffled = shuffled[:n], shuffled[n:]
        table[i, :n] = mine
        table[i, n:] = mine[0]
        used[mine] = True
        used[mine[-1], lens[i] - (n - 1) * block_size :] = False
    shape = num_blocks, block_size, num_kv_heads, head_dim
    generator, unused = torch.Generator(device).manual_seed(seed), ~used.to(device)
    caches = [torch.randn(shape, generator=generator, device=device) * scale for _ in range(2)]
    for cache in caches:
        cache[unused] = float("nan")
    return *(cache.to(dtype) for cache in caches), table.to(device)
