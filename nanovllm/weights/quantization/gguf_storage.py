"""Matrices of a GGUF file that stay in its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES
from nanovllm.layers.linear import Part
from nanovllm.layers.stored_matrices import GGUFMatrix
from nanovllm.weights.quantization.storage import Plane, Storage


@dataclass(frozen=True)
class GGUFStorage(Storage):
    """`X.weight`: uint8 [rows, bytes of a row], read of a tensor whose header says [rows, columns].

    Attributes:
        kind: a type of blocks: a key of `GGUF_TYPES`.
    """

    kind: str

    @property
    def label(self) -> str:
        return f"GGUF {self.kind}"

    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        block = GGUF_TYPES[self.kind].block_size
        return {"weight": Plane(((rows, columns),), (self.kind,), (0, 1), (1, block))}

    def plane_part(self, plane: Plane, cover: Part | None) -> Part | None:
        return cover

    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> GGUFMatrix:
        return GGUFMatrix(planes["weight"], self.kind, columns)
