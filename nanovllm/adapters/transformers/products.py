"""The products of a decode step, each with the norm or activation after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.adapters.transformers.selected import Selection

Tensor = torch.Tensor
Linear = tuple[Tensor, "Tensor | None"]
"""Weight and bias."""


@dataclass(frozen=True)
class Products:
    """What a step multiplies with. None: the library's product, which costs the host least, and then the op after it.

    Attributes:
        add_rms_norm: (x, residual, weight, eps) -> the norm of the sum, the sum.
        activate: gate and up side by side -> their gated product.
        takes: (op, weight) -> the function of that op, if it is faster with this weight and batch.
    """

    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    activate: Callable[[Tensor], Tensor]
    takes: Callable[[str, Tensor], Callable[..., object] | None]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        fn = self.takes("linear", weight)
        return F.linear(x, weight, bias) if fn is None else fn(x, weight, bias)  # type: ignore[return-value]

    def add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """norm(residual + x W^T + b), and the sum. It may write to `residual`."""
        fn = self.takes("linear_add_rms_norm", weight)
        if fn is not None:
            return fn(x, weight, residual, norm_weight, eps, bias)  # type: ignore[return-value]
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm_weight, eps)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """activation(gate(x)) * up(x)."""
        fn = self.takes("linear_silu_and_mul", weight) if bias is None else None
        return self.activate(self.linear(x, weight, bias)) if fn is None else fn(x, weight)  # type: ignore[return-value]


def by_the_library(op: str, weight: Tensor) -> None:
    """`takes` of a step whose time is the host's."""
    return None


def by_kernels(selection: Selection, tokens: int, gate: bool) -> Callable[[str, Tensor], Callable[..., object] | None]:
    """`takes` of a step whose time is the GPU's.

    Args:
        gate: whether the activation is SiLU.
    """
    ops = {"linear": ["linear"], "linear_add_rms_norm": ["linear", "add_rms_norm"]}
    if gate:
        ops["linear_silu_and_mul"] = ["linear_silu_and_mul"]
    known: dict[tuple[str, torch.Size], Callable[..., object] | None] = {}

    def takes(op: str, weight: Tensor) -> Callable[..., object] | None:
        key = op, weight.shape
        if key not in known:
            usable = op in ops and all(part in selection.wanted for part in ops[op])
            known[key] = selection.function(op, weight, tokens) if usable else None
        return known[key]

    return takes
