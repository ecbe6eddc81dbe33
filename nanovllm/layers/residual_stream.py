"""What one sublayer of a decoder, attention or MLP, hands to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ResidualStream(NamedTuple):
    """The sum that every sublayer adds to, and what the next one reads.

    Attributes:
        x: [num_tokens, hidden_size]: the last sublayer's output, not yet added to `residual`; if `normed`, the norm
            of `residual`.
        residual: the same shape; None before the first sublayer.
        normed: whether the addition and the next sublayer's norm are done.
    """

    x: torch.Tensor
    residual: torch.Tensor | None = None
    normed: bool = False
