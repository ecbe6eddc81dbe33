"""Quantisation of floating-point weights while they are loaded.

fp8 has a scale for each row, with which products are fastest; experts have blocks of 128 x 128, which their op reads.
A layer that is split over ranks has the scales of the whole one. int4 and int8 have symmetric groups of up to 128
columns. q4_k_m is GGUF's mixture of Q4_K and Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanovllm.kernels.ops.linear_fp8 import BLOCK
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.moe import StackedMatrices
from nanovllm.layers.stored_matrices import FloatMatrix, Fp8Matrix, IntMatrix
from nanovllm.layers.stored_matrix import StoredMatrix
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.quantization.bits import in_storage
from nanovllm.weights.quantization.fp8_storage import Fp8Storage
from nanovllm.weights.quantization.integers import IntStorage
from nanovllm.weights.quantization.k_quants import more_bits, to_k_quants

GROUP_SIZE = 128
_FP8_MAX = 448.0
WEIGHTS_AT_ONCE = 2**25
"""Weights that are quantised together, which takes some ten times their memory in float32."""
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of the full range that int4 tries: a smaller scale clips the largest weights, and rounds the others less."""


def to_fp8(
    weight: torch.Tensor,
    quantises_activations: bool = True,
    at_once: int = WEIGHTS_AT_ONCE,
    largest_of: Callable[[torch.Tensor], torch.Tensor] = lambda largest: largest,
) -> Fp8Matrix:
    """weight [rows, columns], any float dtype, each row scaled so that its largest value is 448.

    Args:
        quantises_activations: as of `Fp8Matrix`.
        at_once: weights that are quantised together.
        largest_of: float32 [rows, 1], the largest magnitudes of these rows -> those of whole rows, if `weight` has some
            of their columns.
    """
    parts = weight.split(_rows(weight, at_once))
    largest = largest_of(torch.cat([part.abs().amax(1, keepdim=True) for part in parts]).float())
    scale = _scale_of(largest)
    codes = [
        _codes(part.float(), of_part).view(torch.uint8) for part, of_part in zip(parts, scale.split(len(parts[0])))
    ]
    return Fp8Matrix(torch.cat(codes).view(torch.float8_e4m3fn), scale, quantises_activations)


def to_fp8_blocks(
    weight: torch.Tensor, quantises_activations: bool = True, at_once: int = WEIGHTS_AT_ONCE
) -> Fp8Matrix:
    """`to_fp8` with scales of blocks of 128 x 128, as Qwen and DeepSeek publish weights."""
    parts = [_to_fp8_blocks(part) for part in weight.split(_rows(weight, at_once))]
    return Fp8Matrix(
        torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(torch.float8_e4m3fn),
        torch.cat([scale for _, scale in parts]),
        quantises_activations,
    )


def _rows(weight: torch.Tensor, at_once: int) -> int:
    """Rows that are quantised together, a multiple of 128."""
    return max(1, at_once // max(1, weight.shape[1]) // BLOCK) * BLOCK


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    scale = largest / _FP8_MAX
    return torch.where(scale > 0, scale, 1.0)  # the least float32 numbers over 448 are 0


def _codes(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _to_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [block rows, 128, block columns, 128]
    scale = _scale_of(blocks.abs().amax((1, 3)))
    codes = _codes(blocks, scale[:, None, :, None]).view(torch.uint8)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous().view(torch.float8_e4m3fn), scale


def group_size(columns: int) -> int | None:
    """Columns of a group: 128, or the largest smaller power of two from 16 that divides them; None: there is none."""
    return next((size for size in (GROUP_SIZE, 64, 32, 16) if columns % size == 0), None)


def to_int(weight: torch.Tensor, bits: int, group: int, at_once: int = WEIGHTS_AT_ONCE) -> IntMatrix:
    """weight [rows, columns] in symmetric groups, whose scales (float16, or float32 beyond its range) have the least
    squared error among a few.

    Args:
        at_once: weights that are quantised together.

    Raises:
        ValueError: the groups do not divide the columns.
    """
    if weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} columns cannot be in groups of {group}")
    dtype = torch.float16 if bool((weight.abs() < 2**15).all()) else torch.float32
    parts = [_to_int(part, bits, group, dtype) for part in weight.split(_rows(weight, at_once))]
    whole = parts[0].joined(parts[1:]) if len(parts) > 1 else parts[0]
    assert isinstance(whole, IntMatrix)
    return whole


def _to_int(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> IntMatrix:
    groups = weight.float().unflatten(1, (-1, group))
    middle = 1 << bits - 1
    largest = groups.abs().amax(-1, keepdim=True)
    # A scale may be negative, so that the value of largest magnitude is the lowest integer, of which there is one more.
    signed = torch.where(groups.amax(-1, keepdim=True) >= largest, -largest, largest)
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


FormOf = Callable[[str, str], str | None]
"""From a layer's name, such as "model.layers.0.mlp.down_proj", and one of its shards to a form: "fp8", "fp8 blocks",
"int4", "int8", "Q4_K" or "Q6_K"; None: the shard stays as it is."""


class Quantiser:
    """Quantises linear layers, and where `form_of` names them the embedding and the LM head."""

    def __init__(self, form_of: FormOf) -> None:
        self._form_of = form_of

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Quantiser | None:
        """What the arguments ask for; for random weights of a quantised checkpoint's shape the form nearest to its."""
        form_of = _form_of(checkpoint)
        head = checkpoint.online_head
        if head is None:
            return None if form_of is None else cls(form_of)

        def with_head(module: str, shard: str) -> str | None:
            if module == "lm_head":
                return head
            return None if form_of is None else form_of(module, shard)

        return cls(with_head)

    def takes(self, name: str, module: nn.Module) -> bool:
        """Whether some of the layer's weights are quantised."""
        if isinstance(module, StackedMatrices):  # experts, whose op for packed weights reads 8-bit floats
            return module.takes_fp8 and all((self._form_of(name, s) or "").startswith("fp8") for s in module.shards)
        kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
        return isinstance(module, kinds) and any(self._form_of(name, shard) for shard in module.shards)

    def quantised(
        self, name: str, module: nn.Module, shard: str, weight: torch.Tensor
    ) -> tuple[StoredMatrix, str | None]:
        """(a layer's weight [rows, columns] in its form, what that form is; None: it is not quantised)."""
        form = self._form_of(name, shard)
        if form is None:
            return FloatMatrix(weight), None
        in_layer = ".layers." in name
        if form == "fp8 blocks" or (form == "fp8" and isinstance(module, StackedMatrices)):
            return to_fp8_blocks(weight, in_layer), "fp8 in blocks of 128 x 128"
        if form == "fp8":
            if isinstance(module, RowParallelLinear):  # the other ranks have other columns of the same rows
                return to_fp8(weight, in_layer, largest_of=module.group.largest), "fp8 in rows"
            return to_fp8(weight, in_layer), "fp8 in rows"
        if form in ("Q4_K", "Q6_K"):
            if weight.shape[1] % 256 == 0:
                return to_k_quants(weight, form), f"GGUF {form}"
            form = "int8"
        group = group_size(weight.shape[1])
        if group is None:
            return FloatMatrix(weight), f"not quantised, since no group of 16 or more divides {weight.shape[1]} columns"
        return to_int(weight, int(form[3:]), group), f"{form} in groups of {group}"


def _form_of(checkpoint: Checkpoint) -> FormOf | None:
    """The forms of all layers but the head, if that has one of its own."""
    online, quantization = checkpoint.online, checkpoint.quantization
    if online == "q4_k_m":
        return partial(_medium, checkpoint.config.num_hidden_layers, checkpoint.config.tie_word_embeddings)
    if online is not None:
        return lambda module, _: online if ".layers." in module else None
    if checkpoint.format != "dummy" or quantization is None:
        return None

    def nearest(module: str, _: str) -> str | None:
        # Rules name a checkpoint's modules, of which a layer may join several.
        of_first = module.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj")
        storage = quantization.storage_of(of_first) if ".layers." in module else None
        if isinstance(storage, IntStorage):
            return f"int{storage.bits}"
        if not isinstance(storage, Fp8Storage):
            return None
        return "fp8 blocks" if storage.block[1] else "fp8"

    return nearest


def _medium(num_layers: int, tied: bool, module: str, shard: str) -> str | None:
    """The mixture of Q4_K_M: Q6_K for the head and for some layers' values and down projections."""
    if module == "lm_head":
        return None if tied else "Q6_K"
    if module == "model.embed_tokens":
        return "Q6_K" if tied else "Q4_K"
    of_layer = module.partition(".layers.")[2]
    if not of_layer:
        return None
    large = shard == "v" or module.endswith("down_proj")
    return "Q6_K" if large and more_bits(int(of_layer.partition(".")[0]), num_layers) else "Q4_K"
