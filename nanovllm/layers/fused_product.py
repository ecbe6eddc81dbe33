"""An op that begins with a product, as layers call it: with a plain weight or a packed one."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kernels import Kernels
from nanovllm.layers.packed_weight import PackedWeight, Weight
from nanovllm.layers.selected_op import FusedOp


class FusedProduct:
    """`linear_<name>` with a plain weight, `linear_packed_<name>` with a packed one.

    Args:
        kernels: None: neither op is used.
    """

    def __init__(self, name: str, kernels: Kernels | None) -> None:
        self._plain = FusedOp(f"linear_{name}", kernels)
        self._packed = FusedOp(f"linear_packed_{name}", kernels)

    def takes(self, x: torch.Tensor, weight: Weight) -> bool:
        """Whether to call it for x [num_tokens, size] and this weight."""
        if not isinstance(weight, PackedWeight):
            return self._plain.takes(x, weight)
        if not self._packed.used:
            return False
        stored = weight.stored_operands(x)
        return stored is not None and self._packed.takes(x, stored.weight)

    def __call__(self, x: torch.Tensor, weight: Weight, *others: Any) -> Any:
        """The op of x, the weight and its other arguments. Call it only for what it `takes`."""
        if not isinstance(weight, PackedWeight):
            return self._plain(x, weight, *others)
        stored = weight.stored_operands(x)
        assert stored is not None
        return self._packed(x, *stored, *others)
