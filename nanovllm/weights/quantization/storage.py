"""How a checkpoint stores a matrix: which tensors (planes) there are, and what they become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch

from nanovllm.layers.linear import Part
from nanovllm.layers.stored_matrices import FloatMatrix
from nanovllm.layers.stored_matrix import StoredMatrix

WIDE_FLOATS = ("F64", "F32", "F16", "BF16")
"""Names of dtypes in a safetensors header; those of integers are as PyTorch has them."""
Axis = tuple[int, int]


class PlaneError(ValueError):
    """What is wrong with the values of a matrix's plane, as words that follow its name."""

    def __init__(self, plane: str, problem: str) -> None:
        super().__init__(problem)
        self.plane = plane


@dataclass(frozen=True)
class Plane:
    """A tensor of a stored matrix.

    Attributes:
        shapes: those that are allowed.
        dtypes: as a file's header names them.
        rows, columns: (dimension of this tensor, rows or columns of the matrix for each step in it); None: every row or
            column needs the whole tensor.
        required: the checkpoint must have it.
        read: it is needed; others are only checked for their shape.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    rows: Axis | None = None
    columns: Axis | None = None
    required: bool = True
    read: bool = True


@dataclass(frozen=True)
class Storage(ABC):
    """The form in which a checkpoint stores the matrix of a module. Subclasses are one for each layout of tensors."""

    @property
    @abstractmethod
    def label(self) -> str:
        """For messages: "fp8 in blocks of 128 x 128"."""

    @abstractmethod
    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        """The tensors of a matrix [rows, columns] by the last part of their names, such as "weight_scale"."""

    @abstractmethod
    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> StoredMatrix:
        """The matrix [rows, columns] that tensors of the shapes of `planes(rows, columns)` hold.

        Raises:
            ValueError: their values contradict each other; the message names the tensor.
        """

    def problem(self, rows: int, columns: int) -> str | None:
        """Why no matrix [rows, columns] can be stored so; None: it can."""
        return None

    def cover(self, part: Part | None, rows: int, columns: int) -> Part | None:
        """The smallest part around `part` that can be read: whole blocks and whole words."""
        if part is None:
            return None
        axes = [plane.columns if part.dim else plane.rows for plane in self.planes(rows, columns).values()]
        unit = lcm(*(axis[1] for axis in axes if axis))
        if part.dim and self._columns_are_scattered:
            unit = columns
        first = part.start // unit * unit
        last = min(-(-(part.start + part.length) // unit) * unit, columns if part.dim else rows)
        return Part(part.dim, first, last - first)

    @property
    def _columns_are_scattered(self) -> bool:
        """Whether a group of columns may be anywhere."""
        return False

    def plane_part(self, plane: Plane, cover: Part | None) -> Part | None:
        """What must be read of a plane for a part that `cover` returned; None: all of it."""
        axis = None if cover is None else plane.columns if cover.dim else plane.rows
        if cover is None or axis is None:
            return None
        dim, unit = axis
        return Part(dim, cover.start // unit, -(-cover.length // unit))

    def part(
        self, planes: Mapping[str, torch.Tensor], part: Part | None, rows: int, columns: int
    ) -> tuple[StoredMatrix, bool]:
        """(a part of the matrix, whether it had to be dequantised to be cut), from parts of the planes.

        Args:
            rows, columns: of the whole matrix.
        """
        cover = self.cover(part, rows, columns)
        if part is None or cover is None:
            return self.matrix(planes, rows, columns), False
        size = (rows, cover.length) if part.dim else (cover.length, columns)
        matrix = self.matrix(planes, *size)
        start = part.start - cover.start
        if part.length == cover.length:
            return matrix, False
        if part.dim == 0:
            return matrix.rows(start, part.length), False
        cut = matrix.columns(start, part.length)
        if cut is not None:
            return cut, False
        return FloatMatrix(matrix.dequantised()).columns(start, part.length), True


@dataclass(frozen=True)
class StoredShard:
    """A shard of a layer that a checkpoint stores in a packed form.

    Attributes:
        name: the name of its module in the checkpoint.
        rows, columns: of the stored matrix.
        part: what this rank holds of it; None: all.
        shared: the matrix holds other shards too, and is read whole.
        head_order: the order of rows within each head of the model, head_dim indices; None: as they are stored.
    """

    name: str
    storage: Storage
    rows: int
    columns: int
    part: Part | None
    shared: bool = False
    head_order: Sequence[int] | None = None

    @cached_property
    def planes(self) -> dict[str, Plane]:
        return self.storage.planes(self.rows, self.columns)

    def plane_parts(self) -> Iterator[tuple[str, Part]]:
        """(plane, what is read of it) for planes that are not read whole."""
        cover = None if self.shared else self.storage.cover(self.part, self.rows, self.columns)
        for name, plane in self.planes.items():
            part = self.storage.plane_part(plane, cover)
            if part is not None:
                yield name, part

    def matrix(self, planes: Mapping[str, torch.Tensor]) -> tuple[StoredMatrix, bool]:
        """As `Storage.part`."""
        if self.shared:
            assert self.part is not None
            matrix, cut = self.storage.matrix(planes, self.rows, self.columns), False
            matrix = matrix.rows(self.part.start, self.part.length)
        else:
            matrix, cut = self.storage.part(planes, self.part, self.rows, self.columns)
        if self.head_order is not None:
            order = torch.tensor(self.head_order, device=next(iter(planes.values())).device)
            heads = torch.arange(0, matrix.shape[0], len(order), device=order.device)
            matrix = matrix.take_rows((heads[:, None] + order).flatten())
        return matrix, cut
