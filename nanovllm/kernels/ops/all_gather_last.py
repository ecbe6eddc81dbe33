"""Columns that the ranks sharing a model have computed, side by side."""

from __future__ import annotations

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.all_reduce import RankGroup


@op(arguments={"x": "[rows, n]", "out": "[rows, length]"}, mutates=("out",), exported=False)
def all_gather_last(x: torch.Tensor, length: int, group: RankGroup, out: torch.Tensor | None = None) -> torch.Tensor:
    """The columns of x of all ranks, side by side in the order of the ranks, up to `length`.

    Every rank calls it with the same shape, dtype and length, in the same order. The result is equal to the bit on all
    ranks. A provider may write 0.0 in place of -0.0.

    Args:
        x: [rows, n]; it may have a row stride.
        length: at most n times the number of ranks. The columns after it pad the vocabulary.
        group: the ranks.
        out: [rows, length], same dtype, takes the result; it may have a row stride. None: the result is a new tensor,
            or, with one rank, may be a view of x.

    Returns:
        [rows, length], same dtype: `out` if it is given.

    Raises:
        ValueError: the ranks have fewer columns, or `out` has another shape.
    """
    check_gather(x, length, group, out)
    return group.all_gather_last(x, length, out)


def check_gather(x: torch.Tensor, length: int, group: RankGroup, out: torch.Tensor | None) -> None:
    """As `all_gather_last` raises."""
    rows, n = x.shape
    if not 0 <= length <= n * group.size:
        raise ValueError(f"length={length}: must be at most {n * group.size}, {n} columns of each rank")
    if out is not None and out.shape != (rows, length):
        raise ValueError(f"out: expected [{rows}, {length}], got {list(out.shape)}")
