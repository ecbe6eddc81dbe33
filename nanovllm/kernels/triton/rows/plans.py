"""Plans of the row kernels, which a measurement may choose (`tunables.py`), and the policy of their own choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """For kernels that hold whole rows in registers: `rows` of them a program."""

    rows: int
    warps: int


@dataclass(frozen=True)
class WarpPlan:
    """For kernels with one row a program."""

    warps: int


@dataclass(frozen=True)
class BlockPlan:
    """For elementwise kernels: a program has `block` elements, a piece of one row."""

    block: int
    warps: int


@dataclass(frozen=True)
class HeadPlan:
    """For kernels whose programs have `heads` heads of one token."""

    heads: int
    warps: int


@dataclass(frozen=True)
class RowPolicy:
    """Above which sizes the row kernels cut their work for throughput, not for latency. Measured on an H200.

    Attributes:
        few_rows: up to this number of rows a program waits for its row, and many warps load it. With more rows, one
            program hides the latency of another, and idle lanes are the cost.
        few_elements: of an elementwise result.
        few_tokens: of rotary position embedding.
    """

    few_rows: int = 1024
    few_elements: int = 1 << 21
    few_tokens: int = 1024


POLICY = RowPolicy()
