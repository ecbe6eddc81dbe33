"""The tensor-parallel group that layers are split over."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorParallel:
    """This process's rank among `size` that share the model. The default is one process that holds all of it."""

    rank: int = 0
    size: int = 1

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total`; a ValueError naming `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over the group."""
        if self.size == 1:
            return x
        torch.distributed.all_reduce(x)
        return x

    def gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation of the group's x along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)


SINGLE = TensorParallel()
