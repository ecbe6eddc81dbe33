"""From a checkpoint to a model in device memory, strictly: every tensor has its place, every place its tensor.

Formats: safetensors (one file or sharded; memory-mapped), GGUF, and random weights. Names and shapes are read from the
files' headers and compared with the configuration before any memory is taken. Quantised matrices keep their form
(`quantization/`, `packed_layers.py`), or get one while they are loaded.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from nanovllm.kernels import Kernels
from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.layers.packed_weight import PackedWeight, weights_without_memory
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_registry import model_class
from nanovllm.weights import dummy as random_weights
from nanovllm.weights import gguf, safetensors_files
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.packed_layers import PackedLayers, Place, ShardPlanes
from nanovllm.weights.packed_loader import load_packed, stored_tensors
from nanovllm.weights.places import find_places, parts_of
from nanovllm.weights.prepacked_layers import prepack_layers
from nanovllm.weights.quantization.online import Quantiser
from nanovllm.weights.quantization.resolve import packed_blocks, packed_modules, stored_shards
from nanovllm.weights.quantization.storage import Storage
from nanovllm.weights.safetensors_files import TensorHeader, WeightError
from nanovllm.weights.source_layout import SourceLayout
from nanovllm.wording import counted

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    seed: int = 0,
    packed: str | None = None,
    keep_packed: bool | None = None,
) -> DecoderForCausalLM:
    """Build the model on `device` and fill every parameter; of the current group, the part of this rank.

    Args:
        packed: keep the weights in the form that the op `decoder_step` reads, on a CPU; quantised ones as they are,
            to be multiplied with these activations ("float32", "int8" or "bfloat16"). None: for separate ops.
        keep_packed: for separate ops, whether quantised weights stay packed; if not they are expanded to `dtype`.
            None: on a GPU.

    Raises:
        WeightError: a tensor is missing, unexpected, misshapen, not finite, or unreadable; the message names it.
        ValueError: the checkpoint is quantised, and is to be quantised in another way.
    """
    try:
        return _load(checkpoint, kernels, dtype, device, max_position, seed, packed, keep_packed)
    except WeightError as e:
        raise WeightError(_where(e, checkpoint) + str(e)) from e


def _where(error: WeightError, checkpoint: Checkpoint) -> str:
    """What stands before an error: the file that holds its tensor, and the tensor's name there; or the checkpoint."""
    if checkpoint.path is None or str(checkpoint.path) in str(error):
        return ""
    layout = SourceLayout(checkpoint.config, checkpoint.format)
    for header in _stored_headers(checkpoint) if error.tensor else ():
        if error.tensor == header.name or error.tensor in layout.piece_names(header.name):
            return f"{header.file}: " + ("" if repr(header.stored_name) in str(error) else f"{header.stored_name!r}: ")
    return f"{checkpoint.path}: "


def _load(
    checkpoint: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    seed: int,
    packed: str | None,
    keep_packed: bool | None,
) -> DecoderForCausalLM:
    """As `load_model`, with errors that do not say which file they are about."""
    cls = model_class(checkpoint.config.architecture)
    quantiser = Quantiser.of(checkpoint)

    def build(where: torch.device | str) -> DecoderForCausalLM:
        with torch.device(where), _default_dtype(dtype):
            return cls(checkpoint.config, max_position, kernels)

    layout, dummy = SourceLayout(checkpoint.config, checkpoint.format), checkpoint.format == "dummy"
    if dummy:
        meta = build("meta")
        raw = headers = random_weights.read_headers(meta)
        storages: Mapping[str, Storage] = {}
    else:
        raw, headers, storages = _read_headers(checkpoint, layout)
        meta = build("meta")
    shards = stored_shards(meta, storages, None if checkpoint.format == "gguf" else layout.head_order)
    places = find_places(meta, headers, shards)
    if packed:
        planes = ShardPlanes(meta, places, shards, quantiser, dtype, device)
        drawn = ((name, "", tensor) for name, tensor in random_weights.iter_tensors(meta, seed, device))
        return load_packed(
            checkpoint.config, drawn if dummy else stored_tensors(checkpoint), layout, kernels, dtype, max_position,
            places, planes, packed,
        )  # fmt: skip
    with weights_without_memory():
        model = build(device)
    planes = ShardPlanes(model, places, shards, quantiser, dtype, device)
    keep = device.type == "cuda" if keep_packed is None else keep_packed
    layers = PackedLayers(
        model, planes, kernels, dtype, device, keep, quantise_activations=checkpoint.activation_quantization
    )
    parts = parts_of(model, places, shards)
    if dummy:
        stored = random_weights.iter_tensors(meta, seed, device, layout.stored_parts(parts))
    else:
        stored = _read_tensors(checkpoint, raw, layout.stored_parts(parts))
    copy_weights(model, places, layout.tensors(stored, parts, layers.names), layers)
    layers.finish(checkpoint)
    prepack_layers(model, kernels)
    return model.eval()


def _read_headers(
    checkpoint: Checkpoint, layout: SourceLayout
) -> tuple[list[TensorHeader], list[TensorHeader], Mapping[str, Storage]]:
    """The headers as the files have them, the headers as the model names them, and how quantised matrices are stored.

    They are compared with the configuration, before memory is taken.
    """
    raw = _stored_headers(checkpoint)
    storages = packed_modules(checkpoint.quantization, raw) if checkpoint.quantization else {}
    if checkpoint.quantization and not storages:
        logger.warning(
            "%s: the configuration says quant_method=%r, but no tensor is quantised; the weights are taken as they are",
            checkpoint.path, checkpoint.quantization.method,
        )  # fmt: skip
    headers = layout.headers(
        raw, {h.name for h in raw if h.name.rpartition(".")[0] in storages and h.name[-5:] != ".bias"}
    )
    if checkpoint.format == "gguf":  # in its blocks rows lie one behind the other, as the layout wants them
        storages = packed_blocks(headers)
    _check_not_twice(checkpoint, storages)
    _check_layers(checkpoint, headers)
    return raw, headers, storages


def _stored_headers(checkpoint: Checkpoint) -> list[TensorHeader]:
    """The headers as the files have them."""
    assert checkpoint.path is not None
    if checkpoint.format == "gguf":
        return gguf.read_headers(checkpoint.path)
    return safetensors_files.read_headers(checkpoint.path, checkpoint.rename)


def _read_tensors(
    checkpoint: Checkpoint, raw: Sequence[TensorHeader], parts: Mapping[str, Part]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the files, by the names that the files have; of `parts` only what they say."""
    assert checkpoint.path is not None
    if checkpoint.format == "gguf":
        whole = {name + ".weight" for name in packed_blocks(raw)}
        return gguf.iter_tensors(checkpoint.path, parts, whole)
    return safetensors_files.iter_tensors(checkpoint.path, parts, checkpoint.rename)


def _check_not_twice(checkpoint: Checkpoint, storages: Mapping[str, Storage]) -> None:
    """Refuse to quantise what is quantised."""
    head = storages.get("model.embed_tokens" if checkpoint.config.tie_word_embeddings else "lm_head")
    if checkpoint.online_head and head is not None:
        raise ValueError(
            f"lm_head_quantization={checkpoint.online_head!r}: the LM head of {checkpoint.path} is quantised already"
            f" ({head.label}); leave the argument out"
        )
    if storages and checkpoint.online:
        label = Counter(storage.label for storage in storages.values()).most_common(1)[0][0]
        raise ValueError(
            f"quantization={checkpoint.online!r}: {checkpoint.path} is quantised already ({label}); leave the argument"
            " out"
        )


def _check_layers(checkpoint: Checkpoint, headers: Sequence[TensorHeader]) -> None:
    """Refuse a configuration with more layers than the files hold: even to build them without memory takes time."""
    found = {int(match[1]) for header in headers if (match := re.match(r"model\.layers\.(\d+)\.", header.name))}
    wanted = checkpoint.config.num_hidden_layers
    if wanted > (max(found) + 1 if found else len(headers)):
        raise WeightError(
            f"{checkpoint.path}: num_hidden_layers={wanted}, but the files hold {counted(len(found), 'layer')};"
            " correct that entry, or download the model again"
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def copy_weights(
    model: DecoderForCausalLM,
    places: Mapping[str, Place],
    weights: Iterable[tuple[str, torch.Tensor]],
    packed: PackedLayers,
) -> None:
    """Copy a checkpoint's tensors to their places. Each tensor is the part that `parts_of` names.

    Raises:
        WeightError: a tensor is not finite, or a stored LM head differs from the embedding that it is tied to.
    """
    tied = model.config.tie_word_embeddings
    tied_head: torch.Tensor | None = None
    loaded: list[tuple[str, torch.Tensor]] = []
    for name, tensor in weights:
        if name not in places:
            continue
        module_name, parameter, shard = places[name]
        if packed.add(name, places[name], tensor):
            continue
        if tied and module_name == "lm_head":
            tied_head = tensor  # the same matrix as the embedding, stored twice: compared with it below
            continue
        module = model.get_submodule(module_name)
        assert isinstance(module, ShardedParameters)
        loaded.append((name, module.load_shard(parameter, shard, tensor)))
    _check_finite(loaded)
    if tied_head is not None and not _holds(model.lm_head, tied_head):
        raise WeightError(
            "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', but config.json says"
            " tie_word_embeddings=true; set it to false there, or remove the tensor",
            "lm_head.weight",
        )


def _check_finite(weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise a WeightError that names the first weight with NaN or infinity. The host waits for the device once."""
    # A rank may have no rows of a small vocabulary. Both extremes are NaN if one of the values is.
    weights = [(name, weight) for name, weight in weights if weight.numel()]
    extremes = torch.stack([extreme for _, weight in weights for extreme in weight.aminmax()])
    good = extremes.isfinite().view(-1, 2).all(1).tolist()
    bad = [weight for weight, is_good in zip(weights, good) if not is_good]
    if not bad:
        return
    name, weight = bad[0]
    count = weight.numel() - int(weight.isfinite().sum())
    dtype = str(weight.dtype).removeprefix("torch.")
    more = f" (such tensors in all: {len(bad)})" if len(bad) > 1 else ""
    beyond = '; if its values are beyond the 65504 of float16, pass dtype="bfloat16"' if dtype == "float16" else ""
    raise WeightError(
        f"tensor {name!r} holds NaN or infinity in {count} of {weight.numel()} values, as {dtype}{more};"
        f" the checkpoint is damaged: download it again{beyond}",
        name,
    )


def _holds(module: LMHead, tensor: torch.Tensor) -> bool:
    """Whether the module's rows are the tensor's, compared a few at a time: it may be large and in host memory."""
    weight = module.weight
    if isinstance(weight, PackedWeight):
        return torch.equal(tensor.to(weight.dtype), weight.dequantised().to(tensor.device))
    parts = zip(tensor.split(8192), weight[: len(tensor)].split(8192))
    return all(torch.equal(part.to(weight), weight) for part, weight in parts)
