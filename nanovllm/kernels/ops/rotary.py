"""Rotary position embedding (Su et al., 2021), in the half-split layout of transformers."""

from typing import Any

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.checks import check_positions, values_checked


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def qk_inputs(t, num_tokens, num_heads, num_kv_heads, head_dim):
    """Views of a fused projection, as the decoder gives them, with the table of positions up to 4096."""
    qkv = t.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=t.device, dtype=torch.float64) / head_dim)
    angles = torch.arange(4096, device=t.device)[:, None] * frequencies
    return {
        "positions": t.integers(0, 4096, num_tokens),
        "q": q,
        "k": k,
        "cos_sin_cache": t.spread(torch.cat((angles.cos(), angles.sin()), dim=-1).float()),
    }


QK_PATTERNS = {
    "positions": "int64[num_tokens]",
    "q": "[num_tokens, num_heads, head_dim]",
    "k": "[num_tokens, num_kv_heads, head_dim]",
    "cos_sin_cache": "float32[max_position, head_dim] | float64[max_position, head_dim]",
}
# Heads of Qwen3-0.6B, Qwen3-8B and SmolLM2, and unusual ratios and sizes.
QK_SHAPES: dict[str, Any] = {
    "small": [(1, 1, 1, 2), (5, 9, 3, 64), (0, 4, 2, 64), (3, 14, 2, 80), (2, 6, 1, 96), (7, 2, 2, 256)],
    "decode": [(1, 16, 8, 128), (64, 16, 8, 128), (256, 16, 8, 128), (256, 32, 8, 128)],
    "large": [(16384, 16, 8, 128), (16384, 32, 8, 128)],
    "scales": (1.0, 50.0),
}


def fake_qk(positions, q, k, *args, **kwargs):
    """Results of what rotates q and k, without data."""
    return torch.empty_like(q), torch.empty_like(k)


def _cost(positions, q, k, cos_sin_cache):
    return Cost(2 * nbytes(q, k) + nbytes(positions), 3 * (q.numel() + k.numel()))


@op(
    arguments=QK_PATTERNS,
    inputs=Inputs(qk_inputs, **QK_SHAPES),
    cost=_cost,
    tolerance={torch.float16: 2e-3},  # cos and sin are rounded too
    fake=fake_qk,
)
def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each head's pairs (x[i], x[i + head_dim / 2]) by position * frequency[i].

    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.

    Args:
        positions: [num_tokens] int64, below max_position.
        q: [num_tokens, num_heads, head_dim], any float dtype; k: [num_tokens, num_kv_heads, head_dim], same dtype.
        cos_sin_cache: [max_position, head_dim] float32 or float64; a row is cos (head_dim / 2) and then sin.

    Returns:
        Rotated q and k, same shapes and dtypes. cos and sin are rounded to that dtype first, as in transformers.

    Raises:
        ValueError: head_dim is odd; or a position has no row in cos_sin_cache, which is checked on a CPU, elsewhere
            with NANOVLLM_CHECK=1.
    """
    if q.shape[-1] % 2:
        raise ValueError(f"q: head_dim must be even, not {q.shape[-1]}")
    if values_checked(positions.device):
        check_positions(positions, cos_sin_cache)
    cos, sin = cos_sin_cache[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
