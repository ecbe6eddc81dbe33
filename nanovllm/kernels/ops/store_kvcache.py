"""Writing new keys and values into the paged KV cache."""

import torch

from nanovllm.kernels.registry import op


@op
def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Copy row i of k and v to cache slot `slot_mapping[i]`, in place.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        slot_mapping: [num_tokens] int64, block * block_size + offset. Every entry is valid: padding rows point
            into the padding block, which no sequence owns, so that no row needs a test (and a CUDA graph no branch).
    """
    k_cache.flatten(0, 1)[slot_mapping] = k
    v_cache.flatten(0, 1)[slot_mapping] = v
