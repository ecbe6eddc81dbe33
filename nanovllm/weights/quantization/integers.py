"""Matrices of 4- and 8-bit integers with a scale, and maybe a zero point, for each group of columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.layers.stored_matrices import IntMatrix
from nanovllm.weights.quantization.bits import in_storage, unpacked
from nanovllm.weights.quantization.storage import Plane, PlaneError, Storage

_FLOATS = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ's, counted in 4 bits from the lowest, the columns 0 to 7 are."""


@dataclass(frozen=True)
class IntStorage(Storage):
    """bits: 4 or 8; group_size: columns that share a scale, 0: all of them."""

    method: ClassVar[str]
    """Of quantisation, or the tool's name that wrote the checkpoint."""

    bits: int
    group_size: int

    @property
    def label(self) -> str:
        groups = f"in groups of {self.group_size}" if self.group_size else "with one scale a row"
        order = ", columns sorted by group" if self._columns_are_scattered else ""
        return f"int{self.bits} {groups} ({self.method}{order})"

    @property
    def per_word(self) -> int:
        """Integers of an int32 word."""
        return 32 // self.bits

    def groups(self, columns: int) -> int:
        return columns // self.group_size if self.group_size else 1

    def by_group(self, dim: int) -> tuple[int, int] | None:
        """The axis of a plane that has one entry for each group."""
        return (dim, self.group_size) if self.group_size else None

    def problem(self, rows: int, columns: int) -> str | None:
        if self.group_size and columns % self.group_size:
            return f"group_size={self.group_size} does not divide its {columns} columns"
        if self.bits == 4 and columns % 2:
            return f"4-bit weights need an even number of columns, not {columns}"
        return None

    def made(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        permutation: torch.Tensor | None = None,
    ) -> IntMatrix:
        """values: uint8 [rows, columns]; scale, zero: [rows, groups]."""
        zero = None if zero is None or bool((zero == 1 << self.bits - 1).all()) else zero.contiguous()
        if permutation is not None:
            values = values[:, permutation]
        return IntMatrix(in_storage(values, self.bits), scale.contiguous(), zero, self.bits, permutation)


@dataclass(frozen=True)
class AwqStorage(IntStorage):
    """AutoAWQ's "gemm": 4 bits, packed along the rows in an order of its own.

    `X.qweight` int32 [columns, rows / 8], `X.qzeros` int32 [groups, rows / 8], `X.scales` [groups, rows].
    """

    method = "AWQ"
    zero_point: bool = True

    def problem(self, rows: int, columns: int) -> str | None:
        if rows % self.per_word:
            return f"its {rows} rows are no multiple of {self.per_word}"
        return super().problem(rows, columns)

    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        words, groups, axis = rows // self.per_word, self.groups(columns), self.by_group(0)
        zeros = Plane(((groups, words),), ("int32",), (1, self.per_word), axis, required=self.zero_point)
        return {
            "qweight": Plane(((columns, words),), ("int32",), (1, self.per_word), (0, 1)),
            "scales": Plane(((groups, rows),), _FLOATS, (1, 1), axis),
            "qzeros": zeros,
        }

    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> IntMatrix:
        zeros = planes.get("qzeros") if self.zero_point else None
        zero = None if zeros is None else self._in_order(zeros)
        return self.made(self._in_order(planes["qweight"]), planes["scales"].T, zero)

    def _in_order(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [n, rows / 8] -> uint8 [rows, n]"""
        order = torch.tensor(_AWQ_ORDER, device=words.device)
        return unpacked(words, 4, 1).unflatten(1, (-1, self.per_word))[..., order].flatten(1).T


@dataclass(frozen=True)
class GptqStorage(IntStorage):
    """GPTQ: packed along the columns, zero points along the rows.

    `X.qweight` int32 [columns / n, rows] with n = 32 / bits, `X.qzeros` int32 [groups, rows / n], `X.scales` [groups,
    rows], `X.g_idx` int32 [columns], the group of each column.

    Attributes:
        desc_act: columns of a group may lie anywhere. They are sorted by group when they are loaded.
        zeros_less_one: the file's zero points are one lower than the real ones (format "gptq", not "gptq_v2"). The
            subtraction was of whole words, and so is the addition here: a zero point of 0 borrows from the next.
    """

    method = "GPTQ"
    desc_act: bool = False
    zeros_less_one: bool = True

    @property
    def _columns_are_scattered(self) -> bool:
        return self.desc_act

    def problem(self, rows: int, columns: int) -> str | None:
        for name, size in (("rows", rows), ("columns", columns)):
            if size % self.per_word:
                return f"its {size} {name} are no multiple of {self.per_word}"
        return super().problem(rows, columns)

    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        n, groups, axis = self.per_word, self.groups(columns), self.by_group(0)
        return {
            "qweight": Plane(((columns // n, rows),), ("int32",), (1, 1), (0, n)),
            "scales": Plane(((groups, rows),), _FLOATS, (1, 1), axis),
            "qzeros": Plane(((groups, rows // n),), ("int32",), (1, n), axis),
            "g_idx": Plane(((columns,),), ("int32",), None, (0, 1), required=self.desc_act),
        }

    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> IntMatrix:
        zeros = planes["qzeros"]
        if self.zeros_less_one:
            zeros = (zeros.long() + (0x11111111 if self.bits == 4 else 0x01010101)).to(torch.int32)  # modulo 2 ** 32
        values = unpacked(planes["qweight"], self.bits, 0).T
        permutation = sorted_by_group(planes.get("g_idx"), self.group_size, columns, self.desc_act, "g_idx")
        return self.made(values, planes["scales"].T, unpacked(zeros, self.bits, 1).T, permutation)


@dataclass(frozen=True)
class PackedIntStorage(IntStorage):
    """compressed-tensors' "pack-quantized": packed along the columns, zero points along the rows.

    `X.weight_packed` int32 [rows, columns / n] with n = 32 / bits, `X.weight_scale` [rows, groups],
    `X.weight_zero_point` int32 [rows / n, groups], `X.weight_g_idx` int32 [columns], `X.weight_shape` int64 [2].
    Integers are signed ones with 2 ** (bits - 1) added, zero points too.
    """

    method = "compressed-tensors"
    symmetric: bool = True
    desc_act: bool = False
    one_scale: bool = False

    @property
    def _columns_are_scattered(self) -> bool:
        return self.desc_act

    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        n, groups, axis = self.per_word, self.groups(columns), self.by_group(1)
        found = {
            "weight_packed": Plane(((rows, -(-columns // n)),), ("int32",), (0, 1), (1, n)),
            "weight_scale": scale_plane(rows, groups, axis, self.one_scale),
            "weight_shape": Plane(((2,),), ("int64", "int32"), required=False, read=False),
        }
        if not self.symmetric:
            found["weight_zero_point"] = Plane(((-(-rows // n), groups),), ("int32",), (0, n), axis)
        if self.desc_act:
            found["weight_g_idx"] = Plane(((columns,),), ("int32",), None, (0, 1))
        return found

    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> IntMatrix:
        values = unpacked(planes["weight_packed"], self.bits, 1)[:, :columns]
        zero = None if self.symmetric else unpacked(planes["weight_zero_point"], self.bits, 0)[:rows]
        permutation = sorted_by_group(
            planes.get("weight_g_idx"), self.group_size, columns, self.desc_act, "weight_g_idx"
        )
        return self.made(values, rows_of_scales(planes["weight_scale"], rows), zero, permutation)


@dataclass(frozen=True)
class PlainIntStorage(IntStorage):
    """compressed-tensors' "int-quantized": `X.weight` int8 [rows, columns], `X.weight_scale` [rows, groups], and
    `X.weight_zero_point` int8 of the same shape if it is not symmetric. `X.input_scale` may be there: activations are
    not quantised."""

    method = "compressed-tensors"
    symmetric: bool = True
    one_scale: bool = False

    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        groups, axis = self.groups(columns), self.by_group(1)
        scale = scale_plane(rows, groups, axis, self.one_scale)
        unread = Plane(((), (1,), (1, 1)), (*_FLOATS, "int8", "int32"), required=False, read=False)
        found = {
            "weight": Plane(((rows, columns),), ("int8",), (0, 1), (1, 1)),
            "weight_scale": scale,
            "weight_zero_point": Plane(
                scale.shapes, ("int8",), scale.rows, axis, required=not self.symmetric, read=not self.symmetric
            ),
        }
        return found | {"input_scale": unread, "input_zero_point": unread}

    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> IntMatrix:
        zero = None
        if not self.symmetric:
            zero = _unsigned(rows_of_scales(planes["weight_zero_point"], rows))
        values, scale = _unsigned(planes["weight"]), rows_of_scales(planes["weight_scale"], rows)
        if self.bits == 4:  # stored in whole bytes: -8 to 7
            values = values - 120
            zero = None if zero is None else zero - 120
        return self.made(values, scale, zero)


def scale_plane(rows: int, groups: int, axis: tuple[int, int] | None, one: bool) -> Plane:
    """The plane of scales [rows, groups]; one: a single scale of the whole matrix."""
    if one:
        return Plane(((), (1,), (1, 1)), _FLOATS)
    shapes: tuple[tuple[int, ...], ...] = ((rows, groups),)
    return Plane(shapes + (((rows,),) if groups == 1 else ()), _FLOATS, (0, 1), axis)


def rows_of_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, groups] of what `scale_plane` allows."""
    return scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale.reshape(rows, -1)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, 128 more."""
    return values.view(torch.uint8) ^ 128


def sorted_by_group(
    g_idx: torch.Tensor | None, group_size: int, columns: int, allowed: bool, name: str
) -> torch.Tensor | None:
    """The order of columns int64 [columns] in which groups follow each other; None: they do already.

    Args:
        g_idx: the group of each column, or None: in order.
        allowed: whether they may be out of order. If not, g_idx may be that of a part of the columns.

    Raises:
        PlaneError: the groups are not of `group_size` columns each, or out of order and must not be.
    """
    if g_idx is None or not group_size:
        return None
    in_order = torch.arange(columns, device=g_idx.device) // group_size
    if torch.equal(g_idx - (0 if allowed else g_idx[:1]), in_order):
        return None
    if not allowed:
        raise PlaneError(
            name, 'has groups out of order, but the configuration says that they are in order; set "desc_act" to true'
        )
    permutation = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[permutation].long(), in_order):
        raise PlaneError(
            name,
            f"does not name groups of {group_size} columns each, from 0; the checkpoint is damaged: download it again",
        )
    return permutation
