"""Ops that stand for several others, as layers use them."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kernels import Kernels, all_ops


class FusedOp:
    """An op that fuses several, in a layer that can also call these one by one.

    The reference is never used: what it is made of has providers of its own. What multiplies by a weight is used for the numbers
    of tokens that its provider's `num_tokens(weight)`, one range or several, has in it; for any if it does not say.

    Attributes:
        used: whether a provider other than the reference was chosen.
    """

    def __init__(self, name: str, kernels: Kernels | None) -> None:
        self._fn = getattr(kernels, name, None)
        provider = getattr(kernels, "providers", {}).get(name, "native")
        self.used = self._fn is not None and provider != "native"
        self._num_tokens = getattr(all_ops()[name].providers[provider].fn, "num_tokens", None) if self.used else None

    def takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether to call it for x [num_tokens, size] and this weight."""
        return self.used and (self._num_tokens is None or x.shape[0] in self._num_tokens(weight))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)
