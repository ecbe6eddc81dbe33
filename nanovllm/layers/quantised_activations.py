"""The policy of products that quantise activations: which calls of a packed weight multiply 8 bits with 8 bits."""

from __future__ import annotations

import torch

from nanovllm.kernels import Kernels
from nanovllm.layers.selected_op import FusedOp


class QuantisingOp(FusedOp):
    """An op that quantises x for a matrix of 8-bit floats, such as `linear_fp8_dynamic`.

    It replaces the matrix's own op, which keeps x as it is, where three things hold: a provider other than the
    reference was selected; the number of tokens is in the provider's `num_tokens`; and the provider accepts the call.

    Args:
        name: the op; None: x is never quantised.
    """

    def __init__(self, name: str | None, kernels: Kernels) -> None:
        super().__init__(name or "", None if name is None else kernels)
        self._accepts = kernels.provider(name).accepts if name is not None and self.used else None

    def takes_call(self, weight: torch.Tensor, x: torch.Tensor, *others: object) -> bool:
        """Whether to call it for x [num_tokens, size] and its other arguments; weight: this plane of the weight."""
        return self.takes(x, weight) and (self._accepts is None or self._accepts(x, *others) is None)
