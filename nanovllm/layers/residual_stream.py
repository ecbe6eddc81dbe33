"""What one block of a decoder hands to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ResidualStream(NamedTuple):
    """The sum that every block adds to, and what the next one reads.

    Attributes:
        x: [num_tokens, hidden_size]: the last block's output, not yet added to `residual`; if `normed`, the norm of
            `residual`.
        residual: the same shape; None before the first block.
        normed: whether the addition and the next block's norm are done.
    """

    x: torch.Tensor
    residual: torch.Tensor | None = None
    normed: bool = False
