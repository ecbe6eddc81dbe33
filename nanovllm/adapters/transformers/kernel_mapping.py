"""Our layers for the package `kernels`, with which transformers exchanges the forward of layers that have a name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanovllm.kernels import rms_norm, silu_and_mul


class NanovllmRMSNorm(nn.Module):
    """The forward of RMS norms that `kernels` knows by the name "RMSNorm"; the module exchanged has the weight."""

    can_torch_compile = True
    has_backward = False

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., size] -> the same shape and dtype.

        With a weight of another dtype, as under autocast, and where gradients are recorded, the class's own code runs.
        """
        weight = self.weight
        differentiated = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        if hidden_states.dtype != weight.dtype or differentiated:
            return type(self).forward(self, hidden_states)  # `self` is the module exchanged, not one of this class
        return rms_norm(hidden_states, weight, self.variance_epsilon)


class NanovllmSiluAndMul(nn.Module):
    """The forward of "SiluAndMul": silu of the first half of the last dimension times the second half."""

    can_torch_compile = True
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 * size] -> [..., size], same dtype."""
        return silu_and_mul(x)


class LocalLayer:
    """What `kernels` asks for a layer, without a repository: nothing is downloaded."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer_name = layer.__name__
        self._layer = layer

    def load(self) -> type[nn.Module]:
        """The class whose forward is used."""
        return self._layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalLayer) and other._layer is self._layer

    def __hash__(self) -> int:
        return hash(self._layer)

    def __str__(self) -> str:
        return f"nanovllm layer {self.layer_name}"


def kernel_mapping(devices: str | tuple[str, ...] = ("cuda",)) -> dict[str, dict[str, Any]]:
    """The argument of `kernels.use_kernel_mapping`: our layers by the names that models give to theirs.

    Args:
        devices: the type of device for which the layers are used, or several.

    Raises:
        ImportError: the package `kernels` is not installed.
    """
    from kernels import Mode

    devices = (devices,) if isinstance(devices, str) else devices
    layers = {"RMSNorm": NanovllmRMSNorm, "SiluAndMul": NanovllmSiluAndMul}
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE
    return {
        name: {device: {m: LocalLayer(layer) for m in (Mode.INFERENCE, mode)} for device in devices}
        for name, layer in layers.items()
    }
