"""Ops as layers call them: with somewhere to put the result, and those that stand for several others."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kernels import Kernels, all_ops


class ChosenOp:
    """An op by the provider that was chosen, which may write its result to a given tensor: in place where its `takes_out` says so.

    Attributes:
        takes_beside: whether the provider has an argument `beside`: True where other kernels run at the same time.
    """

    def __init__(self, name: str, kernels: Kernels | None) -> None:
        self._fn = getattr(kernels, name, None)
        provider = getattr(kernels, "providers", {}).get(name, "native")
        custom = self._fn is not None and provider != "native"
        self._provider_fn = all_ops()[name].providers[provider].fn if custom else None
        self._takes_out = getattr(self._provider_fn, "takes_out", False)
        self.takes_beside = getattr(self._provider_fn, "takes_beside", False)

    def __call__(self, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """out: takes the result, which is then returned; None: the result is a new tensor."""
        if out is None:
            return self._fn(*args, **kwargs)
        return self._fn(*args, out=out, **kwargs) if self._takes_out else out.copy_(self._fn(*args, **kwargs))


class FusedOp(ChosenOp):
    """An op that fuses several, in a layer that can also call these one by one.

    The reference is never used: what it is made of has providers of its own. What multiplies by a weight is used for the numbers
    of tokens that its provider's `num_tokens(weight)`, one range or several, has in it; for any if it does not say.

    Attributes:
        used: whether a provider other than the reference was chosen.
    """

    def __init__(self, name: str, kernels: Kernels | None) -> None:
        super().__init__(name, kernels)
        self.used = self._provider_fn is not None
        self._num_tokens = getattr(self._provider_fn, "num_tokens", None)

    def takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether to call it for x [num_tokens, size] and this weight."""
        return self.used and (self._num_tokens is None or x.shape[0] in self._num_tokens(weight))
