"""Token embedding."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.registry import op


@op
def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of `weight` [vocab_size, hidden_size] at `token_ids` [num_tokens] int64 -> [num_tokens, hidden_size]."""
    return F.embedding(token_ids, weight)
