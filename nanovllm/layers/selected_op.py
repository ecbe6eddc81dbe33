"""Ops as layers call them: the result may go into a given tensor, and a fused op may be called one by one instead."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kernels import Kernels


class SelectedOp:
    """An op with the provider that was selected for it."""

    def __init__(self, name: str, kernels: Kernels) -> None:
        self._fn = getattr(kernels, name)
        provider = kernels.provider(name)
        self._takes_out, self._takes_concurrent = provider.takes_out, provider.takes_concurrent

    def __call__(self, *args: Any, out: torch.Tensor | None = None, concurrent: bool = False, **kwargs: Any) -> Any:
        """Run the provider.

        Args:
            out: takes the result, which is then returned; None: the result is a new tensor.
            concurrent: other kernels run at the same time; a provider may leave them room.
        """
        if concurrent and self._takes_concurrent:
            kwargs["concurrent"] = True
        if out is None:
            return self._fn(*args, **kwargs)
        return self._fn(*args, out=out, **kwargs) if self._takes_out else out.copy_(self._fn(*args, **kwargs))


class FusedOp(SelectedOp):
    """An op that combines several others, in a layer that can also call these one by one.

    The reference is never used, since the ops that it combines have providers of their own. A provider's `num_tokens`
    says for how many tokens the layer calls it.

    Args:
        kernels: None: the op is not used.

    Attributes:
        used: whether a provider other than the reference was selected.
    """

    def __init__(self, name: str, kernels: Kernels | None) -> None:
        self.used = kernels is not None and kernels.providers.get(name, "native") != "native"
        if kernels is not None and self.used:
            super().__init__(name, kernels)
            self._num_tokens = kernels.provider(name).num_tokens_fn

    def takes(self, x: torch.Tensor, weight: object) -> bool:
        """Whether to call it for x [num_tokens, size] and this weight. Never for a packed weight."""
        if not self.used or not isinstance(weight, torch.Tensor):
            return False
        return self._num_tokens is None or x.shape[0] in self._num_tokens(weight)
