"""Quantisation of floating-point weights while they are loaded.

fp8 has scales for blocks of 128 x 128, as Qwen and DeepSeek publish it: the same kernels serve both, and a layer that
is split over ranks has the blocks of the whole one. int4 and int8 have symmetric groups of up to 128 columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanovllm.kernels.ops.linear_fp8 import BLOCK
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.packed_weight import StoredMatrix
from nanovllm.layers.stored_matrices import FloatMatrix, Fp8Matrix, IntMatrix
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.quantization.bits import in_storage
from nanovllm.weights.quantization.fp8 import Fp8Storage
from nanovllm.weights.quantization.integers import IntStorage

GROUP_SIZE = 128
_FP8_MAX = 448.0
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of the full range that int4 tries: a smaller scale clips the largest weights, and rounds the others less."""


def to_fp8(weight: torch.Tensor) -> Fp8Matrix:
    """weight [rows, columns], any float dtype, in blocks of 128 x 128, each scaled so that its largest value is 448."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [block rows, 128, block columns, 128]
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / _FP8_MAX, 1.0)
    scaled = (blocks / scale[:, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX)
    quantised = scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return Fp8Matrix(quantised.contiguous(), scale)


def group_size(columns: int) -> int | None:
    """Columns of a group: 128, or the largest smaller power of two from 16 that divides them; None: there is none."""
    return next((size for size in (GROUP_SIZE, 64, 32, 16) if columns % size == 0), None)


def to_int(weight: torch.Tensor, bits: int, group: int) -> IntMatrix:
    """weight [rows, columns] in symmetric groups, whose scales (float16, or float32 beyond its range) have the least
    squared error among a few.

    Raises:
        ValueError: the groups do not divide the columns.
    """
    if weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} columns cannot be in groups of {group}")
    groups = weight.float().unflatten(1, (-1, group))
    middle = 1 << bits - 1
    largest = groups.abs().amax(-1, keepdim=True)
    # A scale may be negative, so that the value of largest magnitude is the lowest integer, of which there is one more.
    signed = torch.where(groups.amax(-1, keepdim=True) >= largest, -largest, largest)
    dtype = torch.float16 if bool((largest < 2**15).all()) else torch.float32
    best = torch.full_like(largest, torch.inf)
    scale, values = torch.zeros_like(largest), torch.zeros_like(groups)
    for full in (largest / (middle - 1), signed / middle):
        for shrink in _SHRINKS if bits == 4 else _SHRINKS[:1]:
            tried = (full * shrink).to(dtype).float()
            q = (groups / torch.where(tried == 0, 1.0, tried)).round_().clamp_(-middle, middle - 1)
            error = (q * tried - groups).square_().sum(-1, keepdim=True)
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
            values = torch.where(better, q, values)
    stored = (values + middle).to(torch.uint8).flatten(1)
    return IntMatrix(in_storage(stored, bits), scale.squeeze(-1).to(dtype), None, bits)


class Quantiser:
    """Quantises the linear layers of a model's decoder layers; the embedding and the LM head stay as they are.

    Args:
        form_of: from the name of a layer ("model.layers.0.mlp.down_proj") to "fp8", "int4", "int8" or None.
    """

    def __init__(self, form_of: Callable[[str], str | None]) -> None:
        self._form_of = form_of

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Quantiser | None:
        """What the arguments ask for; for random weights of a quantised checkpoint's shape the form nearest to its."""
        if checkpoint.online is not None:
            return cls(lambda _: checkpoint.online)
        quantization = checkpoint.quantization
        if checkpoint.format != "dummy" or quantization is None:
            return None

        def nearest(module: str) -> str | None:
            # Rules name a checkpoint's modules, of which a layer may join several.
            of_first = module.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj")
            storage = quantization.storage_of(of_first)
            if isinstance(storage, IntStorage):
                return f"int{storage.bits}"
            return "fp8" if isinstance(storage, Fp8Storage) else None

        return cls(nearest)

    def takes(self, name: str, module: nn.Module) -> bool:
        """Whether the layer's weights are quantised."""
        linear = isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        return linear and ".layers." in f".{name}" and self._form_of(name) is not None

    def quantised(self, name: str, weight: torch.Tensor) -> tuple[StoredMatrix, str]:
        """(a layer's weight [rows, columns] in its form, what that form is)."""
        form = self._form_of(name)
        if form == "fp8":
            return to_fp8(weight), "fp8 in blocks of 128 x 128"
        group = group_size(weight.shape[1])
        if group is None:
            return FloatMatrix(weight), f"not quantised, since no group of 16 or more divides {weight.shape[1]} columns"
        assert form in ("int4", "int8")
        return to_int(weight, int(form[3:]), group), f"{form} in groups of {group}"
