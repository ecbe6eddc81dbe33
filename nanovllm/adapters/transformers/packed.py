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
        weights: list[Any] = [layer.weight for layer in layers]
        self.weight = patches.join(weights)
        biases: list[Any] = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = patches.join(biases) if biases else None
        self._layers = list(layers)
        self._addresses = [layer.weight.data_ptr() for layer in layers]

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

    def current(self, layers: Sequence[nn.Linear]) -> bool:
        """Whether these are the layers, with the weights that were packed and without hooks: not after `model.to(...)`,
        nor in a copy, nor with the adapters of PEFT, which have the weight of the layer within.
        """
        if any(a is not b or a._forward_hooks or a._forward_pre_hooks for a, b in zip(layers, self._layers)):
            return False
        if torch.compiler.is_compiling():
            return True  # addresses cannot be traced
        return all(layer.weight.data_ptr() == address for layer, address in zip(layers, self._addresses))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side."""
        return F.linear(x, self.weight, self.bias)
