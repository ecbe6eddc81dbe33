"""Which matrices of a checkpoint are packed: what its configuration says, compared with what its files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES
from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.quantization.fp8_storage import Fp8Storage
from nanovllm.weights.quantization.gguf_storage import GGUFStorage
from nanovllm.weights.quantization.rules import Quantization
from nanovllm.weights.quantization.storage import WIDE_FLOATS, Storage, StoredShard
from nanovllm.weights.safetensors_files import TensorHeader, WeightError

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


def packed_blocks(headers: Sequence[TensorHeader]) -> dict[str, Storage]:
    """How the matrices of a GGUF file are stored, by module; those of other types are expanded when they are read."""
    return {
        header.name.removesuffix(".weight"): GGUFStorage(header.dtype)
        for header in headers
        if header.dtype in GGUF_TYPES and len(header.shape) == 2 and header.name.endswith(".weight")
    }


def packed_modules(quantization: Quantization, headers: Sequence[TensorHeader]) -> dict[str, Storage]:
    """How the matrices of a quantised checkpoint are stored, by module.

    A module that the configuration calls quantised is not if the files hold its plain `weight` and nothing else:
    configurations rarely name all modules that were left as they are.
    """
    found: dict[str, dict[str, TensorHeader]] = {}
    named: dict[str, str] = {}
    for header in headers:
        module, _, leaf = header.name.rpartition(".")
        if leaf != "bias":
            found.setdefault(module, {})[leaf] = header
            named[module] = (header.stored_name or header.name).rpartition(".")[0]
    storages: dict[str, Storage] = {}
    for module, leaves in found.items():
        storage = quantization.storage_of(named[module])  # rules name the modules that the files name
        plain = set(leaves) == {"weight"} and leaves["weight"].dtype in WIDE_FLOATS
        if storage is not None and not plain:
            storages[module] = _named_as_stored(storage, leaves)
    return storages


def _named_as_stored(storage: Storage, leaves: Mapping[str, TensorHeader]) -> Storage:
    """Scales of 8-bit floats have two names, which transformers and vLLM choose differently."""
    if isinstance(storage, Fp8Storage) and storage.scale_name not in leaves:
        other = next((name for name in _SCALE_NAMES if name in leaves), storage.scale_name)
        return replace(storage, scale_name=other)
    return storage


def stored_shards(
    model: DecoderForCausalLM, storages: Mapping[str, Storage], head_order: Sequence[int] | None = None
) -> dict[tuple[str, str], StoredShard]:
    """The packed shards of a model's layers, by module and shard.

    Args:
        model: may be on the meta device.
        storages: by module of the checkpoint. Modules that the model does not have are passed over.
        head_order: as of `StoredShard`, for queries and keys.

    Raises:
        WeightError: a matrix cannot be stored so.
    """
    shards: dict[tuple[str, str], StoredShard] = {}
    for module_name, module in model.named_modules():
        if not isinstance(module, ShardedParameters) or getattr(module, "weight", None) is None:
            continue
        names = {s: model.source_name(module_name, "weight", s).removesuffix(".weight") for s in module.shards}
        shapes = {shard: module.source_shape("weight", shard) for shard in module.shards}
        first: dict[str, int] = {}
        for shard, source in names.items():
            parent, _, name = source.rpartition(".")
            # Of a module that a checkpoint stores as one with others.
            stored = next((fused for fused, pieces in model.SPLIT.items() if name in pieces), name)
            shared = ".".join(part for part in (parent, stored) if part) in storages and stored != name
            full_name = ".".join(part for part in (parent, stored if shared else name) if part)
            storage, shape, part = storages.get(full_name), shapes[shard], module.part("weight", shard)
            if storage is None or len(shape) != 2:
                continue
            rows = shape[0]
            if shared:
                rows = sum(shapes[each][0] for each in module.shards)
                start, length = (0, shape[0]) if part is None else part[1:]
                part = Part(0, first.get(full_name, 0) + start, length)
                first[full_name] = first.get(full_name, 0) + shape[0]
            if problem := storage.problem(rows, shape[1]):
                raise WeightError(f"{full_name!r} cannot be {storage.label}: {problem}; correct the configuration")
            order = head_order if name in ("q_proj", "k_proj") else None
            shards[module_name, shard] = StoredShard(full_name, storage, rows, shape[1], part, shared, order)
    return shards
