"""A matrix of a packed weight, in whatever form it is stored. The forms are in `stored_matrices.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch


class StoredOperands(NamedTuple):
    """A matrix as ops take it that know all forms of storage, such as `linear_packed_silu_and_mul`."""

    storage: str
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None


class StoredMatrix(ABC):
    """A matrix [rows, columns] in some form of storage.

    Attributes:
        op: the op that multiplies with it.
        quantising_op: the op that quantises x as well, for a matrix of a checkpoint made for that; None: x stays.
        permutation: int64 [columns]: stored column i is column permutation[i] of the weight. None: in order.
    """

    op: str
    quantising_op: str | None = None
    permutation: torch.Tensor | None = None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight."""

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """The tensors of which it is made, by name: those among the fields of its dataclass."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @abstractmethod
    def operands(self) -> tuple[Any, ...]:
        """What the op takes between x and the bias."""

    def fill(self) -> None:  # noqa: B027
        """Give the operands their values, just before a product reads them, if they are not in memory always."""

    def stored_operands(self) -> StoredOperands | None:
        """What ops take that know all forms of storage; None: they do not know this one."""
        return None

    @abstractmethod
    def stored(self) -> torch.Tensor:
        """float32 [rows, columns], its columns in stored order."""

    def with_rows(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> StoredMatrix:
        """The same form with other rows: (name, plane) -> the new plane, of each plane that has a row for each row.

        8-bit floats are given and taken as uint8, since not every function knows them.
        """
        changed = {}
        for name, plane in self.planes.items():
            if name != "permutation":
                stored = plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane
                changed[name] = change(name, stored).view(plane.dtype)
        return replace(self, **changed)  # type: ignore[type-var, no-any-return]

    def take_rows(self, index: torch.Tensor) -> StoredMatrix:
        """The rows that int64 [n] names."""
        return self.with_rows(lambda name, plane: plane[index])

    def rows(self, start: int, length: int) -> StoredMatrix:
        """Adjacent rows."""
        if (start, length) == (0, self.shape[0]):
            return self
        device = next(iter(self.planes.values())).device
        return self.take_rows(torch.arange(start, start + length, device=device))

    def padded(self, rows: int) -> StoredMatrix:
        """With rows of zeros behind it, `rows` in all."""
        more = rows - self.shape[0]
        return self.with_rows(
            lambda name, plane: torch.cat([plane, plane.new_zeros(more, *plane.shape[1:])]) if more > 0 else plane
        )

    @abstractmethod
    def columns(self, start: int, length: int) -> StoredMatrix | None:
        """Adjacent columns; None: its blocks cannot be cut there."""

    def joins(self, other: StoredMatrix) -> bool:
        """Whether another matrix below this one is stored in the same way."""
        return False

    def joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        """This matrix with others below it, as one; None: they are stored in another way."""
        if not all(map(self.joins, others)):
            return None
        return self.with_rows(
            lambda name, plane: torch.cat([plane, *(m.planes[name].view(plane.dtype) for m in others)])
        )

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns], computed in float32 and rounded to `dtype` once."""
        values = self.stored()
        if self.permutation is not None:
            values = values[:, self.permutation.argsort()]
        return values.to(dtype)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def not_finite(self) -> torch.Tensor:
        """The number of values among the planes that are NaN or infinite: int64 [], on the matrix's device."""
        counts = [_not_finite(plane) for plane in self.planes.values()]
        return torch.stack(counts).sum()


def _not_finite(plane: torch.Tensor) -> torch.Tensor:
    if plane.dtype == torch.float8_e4m3fn:  # it has no infinity; NaN is all ones
        return ((plane.view(torch.uint8) & 0x7F) == 0x7F).sum()
    if not plane.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=plane.device)
    return (~plane.isfinite()).sum()
