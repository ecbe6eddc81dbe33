"""The ranks that share a model, as layers see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch


@dataclass(frozen=True, eq=False)
class Group:
    """This process's rank among `size` processes that share a model. The default is one process that holds all of it.

    Attributes:
        process_group: a `torch.distributed.ProcessGroup` of these processes; None: there is one process.
        store: what the ranks exchange handles of shared memory by; None: there is one process.
        barrier: waits until every rank has reached the place in the code that its argument names.
        provider_state: what providers of collectives keep for this group, by their name.
        captured_graphs: the CUDA graphs that hold collectives of this group.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None
    store: Any = None
    barrier: Callable[[str], None] = lambda place: None
    provider_state: dict[str, Any] = field(default_factory=dict, repr=False)
    captured_graphs: WeakSet[Any] = field(default_factory=WeakSet, repr=False)

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total`; a ValueError naming `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{total} {what} cannot be divided by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, in the memory of x if it is contiguous; equal to the bit on all ranks."""
        return self._reduced(x, torch.distributed.ReduceOp.SUM) if self.size > 1 else x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of each number of x over the ranks, in the memory of x if it is contiguous."""
        return self._reduced(x, torch.distributed.ReduceOp.MAX) if self.size > 1 else x

    def all_gather_last(self, x: torch.Tensor, length: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, n] of every rank, side by side in the order of the ranks: the first `length` columns, in `out` if it
        is given.
        """
        if self.size == 1:
            return x[:, :length] if out is None else out.copy_(x[:, :length])
        from torch.distributed.distributed_c10d import AllgatherOptions

        rows, n = x.shape
        parts = x.new_empty(self.size * rows, n)
        options = AllgatherOptions()
        options.asyncOp = False  # on the current stream
        work = self.process_group._allgather_base(parts, x.contiguous(), options)
        if work is not None:
            work.wait()
        widths = [max(0, min(n, length - rank * n)) for rank in range(self.size)]
        columns = [part[:, :width] for part, width in zip(parts.view(self.size, rows, n), widths, strict=True)]
        return torch.cat(columns, dim=1, out=out)

    def smallest(self, number: int, device: torch.device) -> int:
        """The least of the ranks' numbers."""
        if self.size == 1:
            return number
        return int(self._reduced(torch.tensor([number], device=device), torch.distributed.ReduceOp.MIN))

    def reset_graphs(self) -> None:
        """End the graphs that hold collectives: NCCL does not end a communicator before them, and would wait for ever.

        No step of this process runs meanwhile.
        """
        for graph in tuple(self.captured_graphs):
            graph.reset()
        self.captured_graphs.clear()

    def _reduced(self, x: torch.Tensor, operation: Any) -> torch.Tensor:
        x = x.contiguous()
        options = torch.distributed.AllreduceOptions()
        options.reduceOp, options.asyncOp = operation, False
        work = self.process_group.allreduce([x], options)
        if work is not None:
            work.wait()
        return x


SINGLE = Group()
_current: ContextVar[Group] = ContextVar("the group that layers are split over", default=SINGLE)


def current_group() -> Group:
    """The group that layers are split over which this thread makes now."""
    return _current.get()


@contextmanager
def split_over(group: Group) -> Iterator[None]:
    """Layers that are made within the block hold this rank's part."""
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)
