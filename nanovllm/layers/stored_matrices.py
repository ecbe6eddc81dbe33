"""The forms of storage of a packed weight: floats, 8-bit floats, 4- and 8-bit integers, and GGUF's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, dequantise_gguf, gguf_planes
from nanovllm.kernels.ops.linear_fp8 import BLOCK, block_shape, dequantise_fp8
from nanovllm.kernels.ops.linear_int4 import dequantise_affine, unpack_int4
from nanovllm.layers.stored_matrix import StoredMatrix, StoredOperands


@dataclass(frozen=True)
class FloatMatrix(StoredMatrix):
    """weight: [rows, columns] of the model's dtype."""

    weight: torch.Tensor
    op = "linear"

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def operands(self) -> tuple[Any, ...]:
        return (self.weight,)

    def stored(self) -> torch.Tensor:
        return self.weight.float()

    def columns(self, start: int, length: int) -> FloatMatrix:
        return FloatMatrix(self.weight.narrow(1, start, length).contiguous())

    def joins(self, other: StoredMatrix) -> bool:
        return isinstance(other, FloatMatrix) and other.weight.dtype == self.weight.dtype


@dataclass(frozen=True)
class Fp8Matrix(StoredMatrix):
    """weight * scale, as the op `linear_fp8` takes them.

    weight: float8_e4m3fn [rows, columns]; scale: float32 [1, rows or rows / 128, 1 or columns / 128];
    quantises_activations: its checkpoint was made for activations of 8 bits, too.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    quantises_activations: bool = False
    op = "linear_fp8"

    @property
    def quantising_op(self) -> str | None:  # type: ignore[override]
        return "linear_fp8_dynamic" if self.quantises_activations else None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def operands(self) -> tuple[Any, ...]:
        return self.weight, self.scale

    def stored_operands(self) -> StoredOperands:
        return StoredOperands("fp8", self.weight, self.scale)

    def stored(self) -> torch.Tensor:
        return dequantise_fp8(self.weight, self.scale)

    def by_row(self) -> Fp8Matrix:
        """The same with scales of its own for each row."""
        height, _ = block_shape(self.weight, self.scale)
        if height == 1:
            return self
        rows = torch.arange(self.shape[0], device=self.scale.device) // height
        return replace(self, scale=self.scale[rows])

    def take_rows(self, index: torch.Tensor) -> StoredMatrix:
        return StoredMatrix.take_rows(self.by_row(), index)

    def rows(self, start: int, length: int) -> StoredMatrix:
        height, _ = block_shape(self.weight, self.scale)
        ends_in_block = (start + length) % BLOCK and start + length < self.shape[0]
        if height != BLOCK or self.scale.shape[0] == 1 or start % BLOCK or ends_in_block:
            return super().rows(start, length)
        scale = self.scale[start // BLOCK : -(-(start + length) // BLOCK)]
        return replace(self, weight=self.weight[start : start + length], scale=scale)

    def padded(self, rows: int) -> StoredMatrix:
        return StoredMatrix.padded(self.by_row(), rows)

    def columns(self, start: int, length: int) -> Fp8Matrix | None:
        scale = self.scale
        if scale.shape[1] > 1:
            if start % BLOCK or (length % BLOCK and start + length < self.shape[1]):
                return None
            scale = scale[:, start // BLOCK : -(-(start + length) // BLOCK)].contiguous()
        weight = self.weight.view(torch.uint8).narrow(1, start, length).contiguous()
        return replace(self, weight=weight.view(torch.float8_e4m3fn), scale=scale)

    def joins(self, other: StoredMatrix) -> bool:
        return isinstance(other, Fp8Matrix) and other.scale.shape[1] == self.scale.shape[1]

    def joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        matrices = [m for m in (self, *others) if isinstance(m, Fp8Matrix)]
        if len(matrices) <= len(others):
            return None
        blocks = all(block_shape(*m.operands())[0] in (BLOCK, m.shape[0]) for m in matrices)
        whole = all(m.shape[0] % BLOCK == 0 for m in matrices[:-1])
        if not (blocks and whole and all(m.scale.shape[0] == -(-m.shape[0] // BLOCK) for m in matrices)):
            matrices = [m.by_row() for m in matrices]
        first = replace(matrices[0], quantises_activations=all(m.quantises_activations for m in matrices))
        return StoredMatrix.joined(first, matrices[1:])


@dataclass(frozen=True)
class IntMatrix(StoredMatrix):
    """(q - zero) * scale, as the ops `linear_int4` and `linear_int8` take them.

    weight: q, uint8 [rows, columns / 2] or [rows, columns]; scale: [rows, groups], any float dtype;
    zero: uint8 [rows, groups], or None for 8 or 128; bits: 4 or 8; permutation: as of `StoredMatrix`.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    bits: int
    permutation: torch.Tensor | None = None

    @property
    def op(self) -> str:  # type: ignore[override]
        return f"linear_int{self.bits}"

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    def operands(self) -> tuple[Any, ...]:
        return self.weight, self.scale, self.zero

    def stored_operands(self) -> StoredOperands:
        return StoredOperands(f"int{self.bits}", self.weight, self.scale, self.zero)

    def values(self) -> torch.Tensor:
        """q, uint8 [rows, columns]."""
        return unpack_int4(self.weight) if self.bits == 4 else self.weight

    def stored(self) -> torch.Tensor:
        return dequantise_affine(self.values(), self.scale, 1 << self.bits - 1 if self.zero is None else self.zero)

    def columns(self, start: int, length: int) -> IntMatrix | None:
        whole, group = start == 0 and length == self.shape[1], self.group_size
        if whole:
            return self
        if self.permutation is not None or (self.scale.shape[1] > 1 and (start % group or length % group)):
            return None
        if self.bits == 4 and (start % 2 or length % 2):
            return None

        def cut(plane: torch.Tensor, unit: int) -> torch.Tensor:
            return plane[:, start // unit : (start + length) // unit].contiguous()

        weight = cut(self.weight, 8 // self.bits)
        if self.scale.shape[1] == 1:
            return replace(self, weight=weight)
        zero = None if self.zero is None else cut(self.zero, group)
        return replace(self, weight=weight, scale=cut(self.scale, group), zero=zero)

    def joins(self, other: StoredMatrix) -> bool:
        if not isinstance(other, IntMatrix) or (other.bits, other.scale.dtype) != (self.bits, self.scale.dtype):
            return False
        if other.scale.shape[1] != self.scale.shape[1]:
            return False
        if self.permutation is None or other.permutation is None:
            return self.permutation is other.permutation
        return torch.equal(self.permutation, other.permutation)

    def _with_zero(self) -> IntMatrix:
        default = torch.full_like(self.scale, 1 << self.bits - 1, dtype=torch.uint8)
        return replace(self, zero=default if self.zero is None else self.zero)

    def joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        matrices = [m for m in (self, *others) if isinstance(m, IntMatrix)]
        if len(matrices) <= len(others):
            return None
        if any(m.zero is not None for m in matrices):
            matrices = [m._with_zero() for m in matrices]
        return StoredMatrix.joined(matrices[0], matrices[1:])


@dataclass(frozen=True)
class GGUFMatrix(StoredMatrix):
    """Rows of GGUF blocks, as the op `linear_gguf` takes them.

    weight: uint8 [rows, bytes of a row]; kind: "Q4_K" and so on, or "Q4_K/planes"; size: columns.
    """

    weight: torch.Tensor
    kind: str
    size: int
    op = "linear_gguf"

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.size

    def operands(self) -> tuple[Any, ...]:
        return self.weight, self.kind

    def stored_operands(self) -> StoredOperands:
        return StoredOperands(self.kind, self.weight)

    def stored(self) -> torch.Tensor:
        return dequantise_gguf(self.weight, self.kind, self.size)

    def as_planes(self) -> GGUFMatrix:
        """In the order of bytes that kernels of a GPU read."""
        if self.kind.endswith("/planes"):
            return self
        return GGUFMatrix(*gguf_planes(self.weight, self.kind), self.size)

    def columns(self, start: int, length: int) -> GGUFMatrix | None:
        form = GGUF_TYPES[self.kind.removesuffix("/planes")]
        if start == 0 and length == self.size:
            return self
        if self.kind.endswith("/planes") or start % form.block_size or length % form.block_size:
            return None
        first, last = (n // form.block_size * form.block_bytes for n in (start, start + length))
        return GGUFMatrix(self.weight[:, first:last].contiguous(), self.kind, length)

    def joins(self, other: StoredMatrix) -> bool:
        return isinstance(other, GGUFMatrix) and other.kind == self.kind

    def not_finite(self) -> torch.Tensor:
        """The number of scales and minima in the blocks that are NaN or infinite."""
        form = GGUF_TYPES[self.kind.removesuffix("/planes")]
        if self.kind.endswith("/planes"):
            return super().not_finite()
        blocks, at, bad = self.weight.unflatten(1, (-1, form.block_bytes)), 0, super().not_finite()
        for name, length in form.fields:
            if name in ("d", "m", "dmin"):
                bad = bad + (~blocks[..., at : at + length].contiguous().view(torch.float16).isfinite()).sum()
            at += length
        return bad
