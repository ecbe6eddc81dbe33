"""Sums over the ranks that share a model, alone and with the residual addition and norm that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.norm import add_rms_norm


class RankGroup(Protocol):
    """Ranks that share a model: `nanovllm.distributed.group.Group`."""

    rank: int
    size: int
    process_group: Any
    store: Any
    barrier: Callable[[str], None]
    provider_state: dict[str, Any]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, by torch.distributed."""

    def all_gather_last(self, x: torch.Tensor, length: int, out: torch.Tensor | None) -> torch.Tensor:
        """The first `length` columns of all ranks side by side, by torch.distributed."""

    def smallest(self, number: int, device: torch.device) -> int:
        """The least of the ranks' numbers; no rank goes on before all have come."""


@op(arguments={"x": "[..., size]"}, reuses=("x",), exported=False)
def all_reduce(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The sum of x over the ranks of a group.

    Every rank calls it with the same shape, in the same order. The result is equal to the bit on all ranks.

    Args:
        x: [..., size], any float dtype. Its memory may be reused: it is not to be read after the call.
        group: the ranks.

    Returns:
        [..., size], same dtype.
    """
    return group.all_reduce(x)


@op(
    arguments={"x": "[..., size]", "residual": "[..., size]", "weight": "[size]"},
    reuses=("x", "residual"),
    fuses=("all_reduce", "add_rms_norm"),
    exported=False,
)
def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: RankGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + the sum of x over the ranks, and its RMS norm.

    Args:
        x, residual: [..., size], any float dtype; weight: [size]. `residual` is equal on all ranks.
        eps: as in `rms_norm`.
        group: the ranks.

    Returns:
        (normalised, new residual), both [..., size]. The sum of x is rounded to the dtype before it is added.
        A provider may reuse the memory of `x` and `residual`.
    """
    return add_rms_norm.native(group.all_reduce(x), residual, weight, eps)
