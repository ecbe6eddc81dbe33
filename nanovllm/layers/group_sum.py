"""The sum over the group of what its ranks have computed, and the norm that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.distributed.group import Group
from nanovllm.kernels import Kernels, all_reduce
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.selected_op import FusedOp

if TYPE_CHECKING:
    from nanovllm.layers.layernorm import RMSNorm


class GroupSum:
    """Sums x over the ranks of a group; with one rank it does nothing.

    Args:
        kernels: None: PyTorch's collectives.
    """

    def __init__(self, group: Group, kernels: Kernels | None) -> None:
        self._group = group
        self._all_reduce = all_reduce.native if kernels is None or group.size == 1 else kernels.all_reduce
        self._all_reduce_add_rms_norm = FusedOp("all_reduce_add_rms_norm", kernels if group.size > 1 else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x, in whose memory it may be."""
        return x if self._group.size == 1 else self._all_reduce(x, self._group)

    def before_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> ResidualStream:
        """The sum of x, for a next sublayer that begins with norm(sum + residual); one op where the batch is small."""
        if self._all_reduce_add_rms_norm.takes(x, norm.weight):
            normed, total = self._all_reduce_add_rms_norm(x, residual, norm.weight, norm.eps, self._group)
            return ResidualStream(normed, total, normed=True)
        return ResidualStream(self(x), residual)
