"""Rotary position embedding (Su et al., 2021), in the half-split layout of transformers."""

import torch

from nanovllm.kernels.registry import op


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


@op
def rotary_embedding(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each head's pairs (x[i], x[i + head_dim / 2]) by position * frequency[i].

    Args:
        positions: [num_tokens] int64.
        q: [num_tokens, num_heads, head_dim]; k: [num_tokens, num_kv_heads, head_dim].
        cos_sin_cache: [max_position, head_dim] float32, a row being cos (head_dim / 2) and then sin.

    Returns:
        Rotated q and k, same shapes and dtypes. cos and sin are rounded to that dtype first, as in transformers.
    """
    cos, sin = cos_sin_cache[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
