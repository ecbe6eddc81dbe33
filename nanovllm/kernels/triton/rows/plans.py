"""How the simple kernels are launched, where a measurement may say so: see `nanovllm.kernels.triton.tunables`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """For kernels that hold whole rows in registers."""

    rows: int
    """Rows of a program."""
    warps: int


@dataclass(frozen=True)
class WarpPlan:
    """For kernels with one row a program."""

    warps: int


@dataclass(frozen=True)
class BlockPlan:
    """For elementwise kernels."""

    block: int
    """Elements of a program, a piece of one row."""
    warps: int


@dataclass(frozen=True)
class HeadPlan:
    """For kernels that take a few heads of one token a program."""

    heads: int
    warps: int
