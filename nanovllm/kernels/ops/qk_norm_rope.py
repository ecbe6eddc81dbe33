"""What lies between Qwen3's query-key projection and attention: the norm of every head, then its rotation."""

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.norm import rms_norm
from nanovllm.kernels.ops.rotary import QK_PATTERNS, QK_SHAPES, fake_qk, qk_inputs, rotary_embedding


def _inputs(t, num_tokens, num_heads, num_kv_heads, head_dim):
    weights = {name: t.normal(head_dim, scale=1) for name in ("q_weight", "k_weight")}
    return {**qk_inputs(t, num_tokens, num_heads, num_kv_heads, head_dim), **weights, "eps": 1e-6}


def _cost(positions, q, k, q_weight, k_weight, eps, cos_sin_cache):
    return Cost(2 * nbytes(q, k) + nbytes(positions), 7 * (q.numel() + k.numel()))


@op(
    arguments={**QK_PATTERNS, "q_weight": "[head_dim]", "k_weight": "[head_dim]"},
    inputs=Inputs(_inputs, **QK_SHAPES),
    cost=_cost,
    tolerance={torch.float16: 3e-3, torch.bfloat16: 2.5e-2},  # rounded after the norm, its weight, and the rotation
    fake=fake_qk,
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
    """rotary_embedding(positions, rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos_sin_cache).

    Source: Qwen Team, "Qwen3 technical report", 2025 (a norm of each head of q and k before the rotation).

    Args:
        positions: [num_tokens] int64.
        q: [num_tokens, num_heads, head_dim], any float dtype; k: [num_tokens, num_kv_heads, head_dim], same dtype.
        q_weight, k_weight: [head_dim], the dtype of q and k.
        eps: the eps of the norms, as in `rms_norm`.
        cos_sin_cache: [max_position, head_dim] float32, as in `rotary_embedding`.

    Returns:
        Rotated q and k, same shapes and dtypes, rounded wherever the two ops round.

    Raises:
        ValueError: as `rotary_embedding`.
    """
    q, k = rms_norm.native(q, q_weight, eps), rms_norm.native(k, k_weight, eps)
    return rotary_embedding.native(positions, q, k, cos_sin_cache)
