"""Matrices of 8-bit floats (e4m3) with scales of the whole matrix, of rows, or of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.kernels.ops.linear_fp8 import BLOCK
from nanovllm.layers.stored_matrices import Fp8Matrix
from nanovllm.weights.quantization.storage import WIDE_FLOATS, Plane, Storage

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Fp8Storage(Storage):
    """`X.weight` float8_e4m3fn [rows, columns] and its scales, which are multiplied.

    Scales of the activations (`input_scale`) may be there. They are not used: where activations are quantised, each
    token gets scales of its own, which fit it more closely.

    Attributes:
        scale_name: "weight_scale_inv" or "weight_scale".
        block: (rows, columns) that share a scale; 0: all of them.
        quantises_activations: whether the configuration says that activations are quantised as well.
    """

    scale_name: str
    block: tuple[int, int]
    quantises_activations: bool = True

    @property
    def label(self) -> str:
        if self.block == (0, 0):
            return "fp8 with one scale a matrix"
        if self.block == (1, 0):
            return "fp8 with one scale a row"
        return f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def planes(self, rows: int, columns: int) -> dict[str, Plane]:
        height, width = self.block[0] or rows, self.block[1] or columns
        shape = (-(-rows // height), -(-columns // width))
        shapes: tuple[tuple[int, ...], ...] = (shape,)
        if not self.block[1]:  # a plane without a second dimension can be cut along the first alone
            shapes += ((shape[0],),)
        if self.block == (0, 0):
            shapes += ((),)
        by_rows, by_columns = ((0, height) if self.block[0] else None), ((1, width) if self.block[1] else None)
        unread = Plane(((), (1,), (1, 1)), WIDE_FLOATS, required=False, read=False)
        return {
            "weight": Plane(((rows, columns),), ("F8_E4M3",), (0, 1), (1, 1)),
            self.scale_name: Plane(shapes, _SCALES, by_rows, by_columns),
            "input_scale": unread,
            "activation_scale": unread,
        }

    def matrix(self, planes: Mapping[str, torch.Tensor], rows: int, columns: int) -> Fp8Matrix:
        height, width = self.block[0] or rows, self.block[1] or columns
        scale = planes[self.scale_name].float().reshape(-(-rows // height), -(-columns // width))
        if width not in (columns, BLOCK):
            scale = scale.repeat_interleave(width // BLOCK, 1)[:, : -(-columns // BLOCK)]
        if height not in (rows, 1, BLOCK):
            scale = scale.repeat_interleave(height, 0)[:rows]
        return Fp8Matrix(planes["weight"].contiguous(), scale.contiguous(), self.quantises_activations)
