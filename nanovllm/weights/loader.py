"""From a checkpoint to a model in device memory, strictly: every tensor has its place, every place its tensor.

Formats: safetensors (one file or sharded; memory-mapped), GGUF, and random weights. Names and shapes are read from the
files' headers and compared with the configuration before any memory is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from nanovllm.kernels import Kernels
from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import model_class
from nanovllm.weights import gguf, safetensors_files
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.packed_loader import Place, load_packed, pack_model
from nanovllm.weights.safetensors_files import TensorHeader, WeightError
from nanovllm.weights.source_layout import SourceLayout


def load_model(
    checkpoint: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    seed: int = 0,
    packed: str | None = None,
) -> DecoderForCausalLM:
    """Build the model on `device` and fill every parameter; of the current group, the part of this rank.

    Args:
        packed: keep the weights in the form that the op `decoder_step` reads, on a CPU; quantised ones as they are,
            to be multiplied with these activations ("float32" or "int8"). None: expand them, for separate ops.

    Raises:
        WeightError: a tensor is missing, unexpected, misshapen, not finite, or unreadable; the message names it.
    """
    cls = model_class(checkpoint.config.architecture)

    def build(where: torch.device | str) -> DecoderForCausalLM:
        with torch.device(where), _default_dtype(dtype):
            return cls(checkpoint.config, max_position, kernels)

    if checkpoint.format == "dummy":
        model = build(device)
        fill_random(model, seed)
        return pack_model(model, kernels, max_position) if packed else model.eval()
    assert checkpoint.path is not None
    files = gguf if checkpoint.format == "gguf" else safetensors_files
    layout = SourceLayout(checkpoint.config, checkpoint.format)
    headers = layout.headers(files.read_headers(checkpoint.path))
    _check_layers(checkpoint, headers)
    places = find_places(build("meta"), headers)
    if packed:
        return load_packed(checkpoint, kernels, dtype, max_position, places, packed)
    model = build(device)
    parts = parts_of(model, places)
    copy_weights(model, places, layout.tensors(files.iter_tensors(checkpoint.path, layout.stored_parts(parts)), parts))
    return model.eval()


def _check_layers(checkpoint: Checkpoint, headers: Sequence[TensorHeader]) -> None:
    """Refuse a configuration with more layers than the files hold: even to build them without memory takes time."""
    found = {int(match[1]) for header in headers if (match := re.match(r"model\.layers\.(\d+)\.", header.name))}
    wanted = checkpoint.config.num_hidden_layers
    if wanted > (max(found) + 1 if found else len(headers)):
        raise WeightError(
            f"{checkpoint.path}: num_hidden_layers={wanted}, but the files hold {len(found)} layers;"
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


def fill_random(model: DecoderForCausalLM, seed: int) -> None:
    """Random weights of a usual scale (norms 1, biases 0, all else normal with deviation 0.02).

    They are drawn tensor by tensor of a checkpoint, so that the ranks of a group of any size hold parts of one model.
    """
    first = next(model.parameters())
    generator = torch.Generator(first.device).manual_seed(seed)
    filled: set[int] = set()
    for module in model.modules():
        if not isinstance(module, ShardedParameters):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in filled:  # a head that is tied to the embedding
                continue
            filled.add(id(parameter))
            if parameter.dim() == 1:
                parameter.fill_(0 if name == "bias" else 1)
                continue
            for shard in module.shards:
                drawn = torch.empty(module.source_shape(name, shard), dtype=first.dtype, device=first.device)
                part = module.part(name, shard)
                drawn.normal_(0, 0.02, generator=generator)
                module.load_shard(name, shard, drawn if part is None else part.of(drawn))


def find_places(model: DecoderForCausalLM, headers: Sequence[TensorHeader]) -> dict[str, Place]:
    """Where each of a checkpoint's tensors belongs in the model's fused, split parameters, by the tensor's name.

    Args:
        model: may be on the meta device, without memory.
        headers: of all tensors in the checkpoint.

    Raises:
        WeightError: a tensor is missing, unexpected, of the wrong shape or dtype, or doubled; the message names it.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, ShardedParameters)}
    missing = {
        (module_name, parameter, shard)
        for module_name, module in modules.items()
        for parameter, _ in module.named_parameters(recurse=False)
        for shard in module.shards
    }
    tied = model.config.tie_word_embeddings
    if tied:
        missing.discard(("lm_head", "weight", ""))
    places: dict[str, Place] = {}
    for header in headers:
        if header.name.endswith("rotary_emb.inv_freq"):
            continue  # a buffer that old Llama checkpoints carry; it is computed
        module_name, _, parameter = header.name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        fused, shard = model.FUSED.get(leaf, (leaf, ""))
        module_name = f"{parent}.{fused}" if parent else fused
        module = modules.get(module_name)
        if module is None or module._parameters.get(parameter) is None or shard not in module.shards:
            raise WeightError(f"unexpected tensor {header.name!r}: this {model.config.architecture} has no such weight")
        expected = module.source_shape(parameter, shard)
        if header.shape != expected:
            raise WeightError(f"tensor {header.name!r} has shape {list(header.shape)}, expected {list(expected)}")
        if not header.is_float:
            raise WeightError(
                f"tensor {header.name!r} has dtype {header.dtype}, expected a floating-point one;"
                " quantised checkpoints are read from GGUF files only"
            )
        place = module_name, parameter, shard
        if header.name in places:
            raise WeightError(f"tensor {header.name!r} occurs twice in the checkpoint")
        places[header.name] = place
        missing.discard(place)
    if missing:
        names = sorted(_checkpoint_name(model, *place) for place in missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise WeightError(f"the checkpoint lacks {', '.join(names[:3])}{more}")
    return places


def parts_of(model: DecoderForCausalLM, places: Mapping[str, Place]) -> dict[str, Part]:
    """What this rank reads of a checkpoint's tensors; tensors that are not in it are read whole."""
    parts: dict[str, Part] = {}
    for name, (module_name, parameter, shard) in places.items():
        module = model.get_submodule(module_name)
        assert isinstance(module, ShardedParameters)
        part = module.part(parameter, shard)
        if part is not None and part.length < module.source_shape(parameter, shard)[part.dim]:
            parts[name] = part
    return parts


def copy_weights(
    model: DecoderForCausalLM, places: Mapping[str, Place], weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy a checkpoint's tensors, of which each is the part that `parts_of` names, to their places.

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
            " tie_word_embeddings=true; set it to false there, or remove the tensor"
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
        f" the checkpoint is damaged: download it again{beyond}"
    )


def _holds(module: LMHead, tensor: torch.Tensor) -> bool:
    """Whether the module's rows are the tensor's, compared a few at a time: it may be large and in host memory."""
    parts = zip(tensor.split(8192), module.weight[: len(tensor)].split(8192))
    return all(torch.equal(part.to(weight), weight) for part, weight in parts)


def _checkpoint_name(model: DecoderForCausalLM, module_name: str, parameter: str, shard: str) -> str:
    parent, _, leaf = module_name.rpartition(".")
    original = {value: key for key, value in model.FUSED.items()}.get((leaf, shard), leaf)
    return ".".join(part for part in (parent, original, parameter) if part)
