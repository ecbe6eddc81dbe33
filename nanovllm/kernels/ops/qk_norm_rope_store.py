"""All that lies between the QKV projection and attention: head norms, rotation, and the new keys and values into the
cache.
"""

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope
from nanovllm.kernels.ops.rotary import QK_PATTERNS, QK_SHAPES, qk_inputs, rotary_embedding
from nanovllm.kernels.ops.store_kvcache import VALUE_PATTERNS, store_kvcache, value_inputs


def _inputs(t, num_tokens, num_heads, num_kv_heads, head_dim):
    return {
        **qk_inputs(t, num_tokens, num_heads, num_kv_heads, head_dim),
        **value_inputs(t, num_tokens, num_kv_heads, head_dim, block_size=16),
        "q_weight": t.parameter(head_dim, scale=1),
        "k_weight": t.parameter(head_dim, scale=1),
        "eps": 1e-6,
    }


def _cost(positions, q, k, v, cos_sin_cache, k_cache, v_cache, slot_mapping, *weights, **_):
    written = (k.numel() + v.numel()) * k_cache.element_size()
    return Cost(2 * nbytes(q) + nbytes(k, v, positions, slot_mapping) + written, 7 * (q.numel() + k.numel()))


@op(
    arguments={
        **QK_PATTERNS,
        **VALUE_PATTERNS,
        "q_weight": "[head_dim]",
        "k_weight": "[head_dim]",
    },
    inputs=Inputs(_inputs, **QK_SHAPES, variants=[{}, {"q_weight": None, "k_weight": None}]),
    cost=_cost,
    tolerance={torch.float16: 3e-3, torch.bfloat16: 2.5e-2},  # rounded after the norm, its weight, and the rotation
    mutates=("k_cache", "v_cache"),
    fuses=("qk_norm_rope", "rotary_embedding", "store_kvcache"),
    fake=lambda positions, q, *args, **kwargs: torch.empty_like(q),
)
def qk_norm_rope_store(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None, eps: float = 0.0, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`qk_norm_rope`, or without weights `rotary_embedding`, and then `store_kvcache` of the rotated k and of v.

    Args:
        positions: [num_tokens] int64.
        q: [num_tokens, num_heads, head_dim], any float dtype; k, v: [num_tokens, num_kv_heads, head_dim], same dtype.
        cos_sin_cache: [max_position, head_dim] float32, as in `rotary_embedding`.
        k_cache, v_cache, slot_mapping, k_scale, v_scale: as in `store_kvcache`; the caches are written in place.
        q_weight, k_weight: [head_dim], the dtype of q and k, of the norm of each head; both or neither.
        eps: added to the mean of the squares in the norms.

    Returns:
        Rotated q, contiguous. Everything is rounded wherever the separate ops round.

    Raises:
        ValueError: one norm weight without the other, or what `rotary_embedding` and `store_kvcache` raise.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight, k_weight: expected both or neither, got one")
    if q_weight is None:
        q, k = rotary_embedding.native(positions, q, k, cos_sin_cache)
    else:
        q, k = qk_norm_rope.native(positions, q, k, q_weight, k_weight, eps, cos_sin_cache)
    store_kvcache.native(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q
