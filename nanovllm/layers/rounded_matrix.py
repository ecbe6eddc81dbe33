"""Packed weights as 8-bit floats for steps of many tokens, in memory that all layers share.

Tensor cores multiply 8-bit floats with 8-bit floats twice as fast as 16 bits with 16 bits. So just before the product a
weight is rounded to e4m3 into a buffer, where the next layer's weight replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.ops.packed_to_fp8 import row_factors
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.selected_op import SelectedOp
from nanovllm.layers.stored_matrices import Fp8Matrix
from nanovllm.layers.stored_matrix import StoredMatrix

WEIGHTS_AT_ONCE = 2**25
"""Weights whose magnitudes are compared together, which takes some ten times their memory in float32."""


@dataclass(frozen=True)
class RoundedMatrix(StoredMatrix):
    """Matrices below each other, of which each row is rounded to e4m3 and has a scale.

    Two of them may have the same memory. The steps of one stream fill it and read it in turns, so `fill` must be
    called before each product.

    weight: float8_e4m3fn [rows, columns], contiguous, without values before `fill`; scale: float32 [rows, 1];
    factor: float32 [rows], as of `row_factors`; parts: the packed matrices; round_to_fp8: the op `packed_to_fp8`.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    factor: torch.Tensor
    parts: tuple[StoredMatrix, ...]
    round_to_fp8: SelectedOp
    permutation: torch.Tensor | None = None
    op = "linear_fp8"
    quantising_op = "linear_fp8_dynamic"

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight, self.scale

    def fill(self) -> None:
        sizes = [part.shape[0] for part in self.parts]
        of_parts = zip(self.parts, self.weight.split(sizes), self.factor.split(sizes))
        for part, weight, factor in of_parts:
            operands = part.stored_operands()
            assert operands is not None  # `rounded` has asked
            self.round_to_fp8(*operands, part.shape[1], factor, out=weight)

    def stored(self) -> torch.Tensor:
        self.fill()
        return dequantise_fp8(self.weight, self.scale)

    def columns(self, start: int, length: int) -> None:
        return None


def rounded(weight: PackedWeight, buffer: torch.Tensor, kernels: Kernels) -> PackedWeight:
    """The form of a weight for products with quantised activations.

    Matrices of 8-bit floats stay as they are and quantise activations; those that are stored in floats do not.

    Args:
        buffer: uint8 [bytes], at least `rounded_bytes`.
    """
    matrices: list[StoredMatrix] = []
    for run in _runs(weight.matrices):
        first = run[0]
        if isinstance(first, Fp8Matrix):
            matrices.append(replace(first, quantises_activations=True))
        elif not _is_packed(first):
            matrices += run
        else:
            shape = sum(m.shape[0] for m in run), first.shape[1]
            codes = buffer[: shape[0] * shape[1]].view(torch.float8_e4m3fn).view(shape)
            factor, scale = row_factors(torch.cat([largest_of_rows(m) for m in run]))
            op = SelectedOp("packed_to_fp8", kernels)
            matrices.append(RoundedMatrix(codes, scale[:, None], factor, tuple(run), op, first.permutation))
    return PackedWeight(matrices, weight.dtype, kernels)


def rounded_bytes(weight: PackedWeight) -> int:
    """Bytes of the buffer that `rounded` needs for a weight; 0: nothing of it is rounded."""
    return max(sum(m.shape[0] * m.shape[1] for m in run if _is_packed(m)) for run in _runs(weight.matrices))


def _runs(matrices: Sequence[StoredMatrix]) -> list[list[StoredMatrix]]:
    """Matrices for one product each: adjacent ones that are packed, with columns in one order; others one by one."""
    runs: list[list[StoredMatrix]] = []
    for matrix in matrices:
        if runs and _is_packed(matrix) and _is_packed(runs[-1][0]) and _same_order(matrix, runs[-1][0]):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return runs


def _same_order(one: StoredMatrix, other: StoredMatrix) -> bool:
    if one.permutation is None or other.permutation is None:
        return one.permutation is other.permutation
    return torch.equal(one.permutation, other.permutation)


def _is_packed(matrix: StoredMatrix) -> bool:
    """Whether `packed_to_fp8` rounds it: it is stored in integers or in GGUF's blocks."""
    return not isinstance(matrix, Fp8Matrix) and matrix.stored_operands() is not None


def largest_of_rows(matrix: StoredMatrix, at_once: int = WEIGHTS_AT_ONCE) -> torch.Tensor:
    """The largest magnitude of each row: float32 [rows]. at_once: weights that are dequantised together."""
    rows, columns = matrix.shape
    step = max(1, at_once // max(1, columns))
    parts = (matrix.rows(start, min(step, rows - start)) for start in range(0, rows, step))
    return torch.cat([part.stored().abs().amax(1) for part in parts])
