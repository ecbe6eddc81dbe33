"""RMS normalisation, with or without the residual addition before it."""

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.layers.linear import ShardedParameters
from nanovllm.layers.residual_stream import ResidualStream


class RMSNorm(ShardedParameters):
    """norm(x), or with a residual: (norm(x + residual), x + residual). See the ops `rms_norm` and `add_rms_norm`."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self._rms_norm = kernels.rms_norm
        self._add_rms_norm = kernels.add_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def of(self, stream: ResidualStream) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); without a residual, (norm(x), x). A normed stream stays as it is."""
        x, residual, normed = stream
        if residual is not None and normed:
            return x, residual
        if residual is None:
            return self._rms_norm(x, self.weight, self.eps), x
        return self._add_rms_norm(x, residual, self.weight, self.eps)
