"""Plain weights in the form that the provider of `linear` multiplies with fastest. The dense tensor is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.kernels.op.provider import Prepacked
from nanovllm.layers.packed_weight import PackedWeight, Weight
from nanovllm.layers.stored_matrices import FloatMatrix
from nanovllm.layers.stored_matrix import StoredMatrix


@dataclass(frozen=True)
class PrepackedMatrix(StoredMatrix):
    """Floats in a provider's form. What is cut off or joined is dense again."""

    packed: Prepacked
    op = "linear"

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.packed.operand.shape
        return rows, columns

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        return {"weight": self.packed.operand}

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def operands(self) -> tuple[torch.Tensor]:
        return (self.packed.operand,)

    def _dense(self) -> FloatMatrix:
        return FloatMatrix(self.packed.dense())

    def stored(self) -> torch.Tensor:
        return self._dense().stored()

    def take_rows(self, index: torch.Tensor) -> FloatMatrix:
        return FloatMatrix(self.packed.rows(index))

    def rows(self, start: int, length: int) -> StoredMatrix:
        return self._dense().rows(start, length)

    def padded(self, rows: int) -> StoredMatrix:
        return self._dense().padded(rows)

    def columns(self, start: int, length: int) -> FloatMatrix:
        return self._dense().columns(start, length)

    def joined(self, others: Sequence[StoredMatrix]) -> StoredMatrix | None:
        dense = [m._dense() if isinstance(m, PrepackedMatrix) else m for m in others]
        return self._dense().joined(dense)

    def not_finite(self) -> torch.Tensor:
        return self._dense().not_finite()


def prepacked(weight: Weight, kernels: Kernels, readable: bool = False) -> PackedWeight | None:
    """A layer's weight in the form of the selected provider of `linear`; None: it stays as it is.

    Args:
        readable: rows will be read one by one, as an embedding's.
    """
    prepack = kernels.provider("linear").prepack_fn
    if prepack is None or not isinstance(weight, nn.Parameter) or weight.requires_grad:
        return None
    packed = prepack(weight.data, readable)
    return None if packed is None else PackedWeight([PrepackedMatrix(packed)], weight.dtype, kernels)
