"""From a checkpoint to packed weights for a CPU: the file's blocks are rearranged, and never expanded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.cpu.library import GGUF_FORMATS, PLAIN, PackedMatrix
from nanovllm.kernels.ops.decoder_step import DecoderLayerWeights, DecoderWeights
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.stored_matrix import StoredMatrix
from nanovllm.model_config import ModelConfig
from nanovllm.models.packed_decoder import PackedDecoderForCausalLM
from nanovllm.weights import gguf, safetensors_files
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.cpu_blocks import packed_matrix
from nanovllm.weights.packed_layers import Place, ShardPlanes, log_form
from nanovllm.weights.safetensors_files import WeightError
from nanovllm.weights.source_layout import SourceLayout

logger = logging.getLogger(__name__)

_NAMES = {
    ("self_attn.qkv_proj", "q"): "q", ("self_attn.qkv_proj", "k"): "k", ("self_attn.qkv_proj", "v"): "v",
    ("self_attn.o_proj", ""): "o", ("mlp.gate_up_proj", "gate"): "gate", ("mlp.gate_up_proj", "up"): "up",
    ("mlp.down_proj", ""): "down", ("input_layernorm", ""): "input_norm",
    ("post_attention_layernorm", ""): "post_norm", ("self_attn.q_norm", ""): "q_norm",
    ("self_attn.k_norm", ""): "k_norm",
}  # fmt: skip
"""(module of a layer, shard) -> field of `DecoderLayerWeights`."""


def load_packed(
    config: ModelConfig,
    stored: Iterable[tuple[str, str, torch.Tensor]],
    layout: SourceLayout,
    kernels: Kernels,
    dtype: torch.dtype,
    max_position: int,
    places: Mapping[str, Place],
    planes: ShardPlanes,
    activations: str = "float32",
) -> PackedDecoderForCausalLM:
    """A model with packed weights.

    Blocks of a GGUF file stay as they are. Other quantised matrices stay packed if a format of the C++ kernels holds
    the same numbers (`packed_matrix`), and else become plain ones.

    Args:
        stored: the tensors of a checkpoint, as `stored_tensors` yields them.
        dtype: plain matrices are stored in it, or in 16 bits if the file has these and it is float32.
        places: the places of the checkpoint's tensors, from `find_places`.
        planes: the planes of quantised matrices.
        activations: what matrices are multiplied with, as in `PackedMatrix`.

    Raises:
        WeightError: a weight is not finite, or a stored LM head differs from the embedding that it is tied to.
    """
    tensors = (
        (name, format, tensor)
        for stored_name, format, stored_tensor in stored
        for name, tensor in layout.tensors([(stored_name, stored_tensor)], as_stored=planes.names)
    )
    weights = _with_matrices(tensors, places, planes, activations)
    model = _pack(config, weights, kernels, dtype, max_position, activations, planes.makes_head)
    log_form(planes, "")
    return model


def _with_matrices(
    tensors: Iterable[tuple[str, str, torch.Tensor]],
    places: Mapping[str, Place],
    planes: ShardPlanes,
    activations: str,
) -> Iterator[tuple[str, Place, str, torch.Tensor | PackedMatrix]]:
    """(name, place, format, tensor) of every weight, for a checkpoint's tensors in the model's layout."""
    for name, format, tensor in tensors:
        place = places.get(name)
        if place is None:
            continue
        if place[0] == "model.embed_tokens" and planes.makes_head:
            head = planes.head_of(tensor)
            assert head is not None
            yield "lm_head.weight", ("lm_head", "weight", ""), "", _matrix(head, activations)
        if (format and tensor.dtype == torch.uint8) or not planes.takes(place):
            yield name, place, format, tensor
            continue
        for module, shard, matrix in planes.add(name, place, tensor):
            if matrix.not_finite():
                raise WeightError(
                    f"tensor {name!r}, or another of the same matrix, holds NaN or infinity; the checkpoint is damaged:"
                    " download it again",
                    name,
                )
            yield name, (module, "weight", shard), "", _matrix(matrix, activations)


def _matrix(matrix: StoredMatrix, activations: str) -> torch.Tensor | PackedMatrix:
    """The matrix packed for the C++ kernels, or float32 if no format of theirs has its numbers."""
    packed = packed_matrix(matrix, activations)
    return matrix.dequantised() if packed is None else packed


def _pack(
    config: ModelConfig,
    stored: Iterable[tuple[str, Place, str, torch.Tensor | PackedMatrix]],
    kernels: Kernels,
    dtype: torch.dtype,
    max_position: int,
    activations: str,
    own_head: bool,
) -> PackedDecoderForCausalLM:
    """The model of these weights.

    Args:
        stored: (name, place, format, tensor) of every weight, which may be packed already.
        own_head: the LM head may differ from the embedding that it is tied to.
    """
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_hidden_layers)]
    rest: dict[str, Any] = {}
    for name, (module, parameter, shard), format, tensor in stored:
        weight: PackedMatrix | torch.Tensor
        if isinstance(tensor, PackedMatrix) or tensor.dim() == 2:
            weight = _packed(name, format, tensor, dtype, activations)
        else:
            weight = _vector(name, tensor)
        if module.startswith("model.layers."):
            index, _, inner = module.removeprefix("model.layers.").partition(".")
            layers[int(index)][_NAMES[inner, shard] + ("_bias" if parameter == "bias" else "")] = weight
        else:
            rest[module] = weight
    embedding = rest["model.embed_tokens"]
    head = rest.get("lm_head", embedding)
    if config.tie_word_embeddings and head is not embedding and not own_head:
        if head.format != embedding.format or not torch.equal(head.tiles, embedding.tiles):
            raise WeightError(
                "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', but config.json says"
                " tie_word_embeddings=true; set it to false there, or remove the tensor",
                "lm_head.weight",
            )
        head = embedding
    with torch.device("cpu"):
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_position, kernels)
    weights = DecoderWeights(
        [
            DecoderLayerWeights(**fields, window=layer.window, rotated=layer.rope is not None)
            for fields, layer in zip(layers, config.layers)
        ],
        rest["model.norm"], rotary.cos_sin_cache,
        config.rms_norm_eps,
    )  # fmt: skip
    packed = PackedDecoderForCausalLM(config, weights, embedding, head, kernels)
    logger.info("the layers run as one op on packed weights, %.0f MB", packed.nbytes / 1e6)
    return packed.eval()


def stored_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name, format, tensor) of every tensor in a checkpoint's files; format: of a GGUF file's blocks, or ""."""
    assert checkpoint.path is not None
    if checkpoint.format == "gguf":
        yield from gguf.iter_stored(checkpoint.path)
        return
    for name, tensor in safetensors_files.iter_tensors(checkpoint.path, rename=checkpoint.rename):
        yield name, "", tensor


def _packed(
    name: str, format: str, tensor: torch.Tensor | PackedMatrix, dtype: torch.dtype, activations: str
) -> PackedMatrix:
    if isinstance(tensor, PackedMatrix):
        matrix = tensor
    elif tensor.dtype != torch.uint8:
        # Products are of float32 anyway: 16 bits that the file has need not become 32.
        stored = tensor if dtype == torch.float32 and tensor.dtype in PLAIN else tensor.to(dtype)
        matrix = PackedMatrix.of(stored, activations)
    elif format in GGUF_FORMATS:
        block, size = gguf.block_size(format)
        matrix = PackedMatrix(format, tensor, tensor.shape[1] // size * block, activations)
    else:
        matrix = PackedMatrix.of(gguf.dequantized(tensor, format).to(dtype), activations)
    if not matrix.is_finite():
        raise WeightError(
            f"tensor {name!r} holds NaN or infinity, as {matrix.format}; the checkpoint is damaged: download it again",
            name,
        )
    return matrix


def _vector(name: str, tensor: torch.Tensor) -> torch.Tensor:
    vector = tensor.float().contiguous()
    if not vector.isfinite().all():
        raise WeightError(f"tensor {name!r} holds NaN or infinity; the checkpoint is damaged: download it again", name)
    return vector.clone()  # not the mapped file
