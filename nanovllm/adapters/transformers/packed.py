"""Weights of several linear layers that lie one after the other in memory, so that one product computes them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.adapters.transformers.patches import Patches, foreign_forward
from nanovllm.adapters.transformers.probe import plain_parameter


class Packed:
    """Linear layers of the same input, whose parameters are made views of one tensor.

    Parameters stay the objects that they are, with the same values. After `undo` each has memory of its own again.

    Attributes:
        weight: [outputs of all layers, inputs].
        bias: [outputs of all layers] or None.
        sizes: outputs of each layer.
    """

    def __init__(self, layers: Sequence[nn.Linear], patches: Patches) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self._parameters: list[Any] = [layer.weight for layer in layers]
        self.weight = _joined([*self._parameters], patches)
        self.bias: nn.Parameter | None = None
        biases: list[Any] = [layer.bias for layer in layers]
        if all(bias is not None for bias in biases):
            self._parameters += biases
            self.bias = _joined(biases, patches)
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]

    @staticmethod
    def refused(layers: Sequence[nn.Linear]) -> str | None:
        """Why layers cannot be packed; None: they can."""
        for layer in layers:
            for parameter in (layer.weight, *([] if layer.bias is None else [layer.bias])):
                if (reason := plain_parameter(parameter)) is not None:
                    return reason
            if layer._forward_hooks or layer._forward_pre_hooks:
                return "its projections have hooks"
            if (reason := foreign_forward(layer)) is not None:
                return f"of a projection: {reason}"
        first = layers[0].weight
        if any(x.weight.dtype != first.dtype or x.weight.device != first.device for x in layers):
            return "its projections have weights of several dtypes or devices"
        if len({layer.bias is None for layer in layers}) > 1:
            return "only some of its projections have a bias"
        return None

    def current(self) -> bool:
        """Whether the layers still have the weights that were packed; not after `model.to(...)`."""
        if torch.compiler.is_compiling():
            return True  # addresses cannot be traced
        return all(p.data_ptr() == address for p, address in zip(self._parameters, self._addresses))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side."""
        return F.linear(x, self.weight, self.bias)


def _joined(parameters: Sequence[nn.Parameter], patches: Patches) -> nn.Parameter:
    joined = nn.Parameter(torch.cat([p.data for p in parameters]), requires_grad=False)
    for parameter, part in zip(parameters, joined.data.split([len(p) for p in parameters])):
        parameter.data = part

    def apart() -> None:
        for parameter in parameters:
            if parameter.data.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr():
                parameter.data = parameter.data.clone()

    patches.on_undo(apart)
    return joined
