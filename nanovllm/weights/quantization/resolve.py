"""Which matrices of a checkpoint are packed: what its configuration says, compared with what its files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES
from nanovllm.layers.linear import ShardedParameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.quantization.fp8 import Fp8Storage
from nanovllm.weights.quantization.gguf_blocks import GGUFStorage
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
    for header in headers:
        module, _, leaf = header.name.rpartition(".")
        if leaf != "bias":
            found.setdefault(module, {})[leaf] = header
    storages: dict[str, Storage] = {}
    for module, leaves in found.items():
        storage = quantization.storage_of(module)
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


def stored_shards(model: DecoderForCausalLM, storages: Mapping[str, Storage]) -> dict[tuple[str, str], StoredShard]:
    """The packed shards of a model's layers, by module and shard.

    Args:
        model: may be on the meta device.
        storages: by module of the checkpoint. Modules that the model does not have are passed over.

    Raises:
        WeightError: a matrix cannot be stored so.
    """
    shards: dict[tuple[str, str], StoredShard] = {}
    original = {place: name for name, place in model.FUSED.items()}
    for module_name, module in model.named_modules():
        if not isinstance(module, ShardedParameters) or getattr(module, "weight", None) is None:
            continue
        parent, _, leaf = module_name.rpartition(".")
        for shard in module.shards:
            name = ".".join(part for part in (parent, original.get((leaf, shard), leaf)) if part)
            storage = storages.get(name)
            shape = module.source_shape("weight", shard)
            if storage is None or len(shape) != 2:
                continue
            if problem := storage.problem(*shape):
                raise WeightError(f"{name!r} cannot be {storage.label}: {problem}; correct the configuration")
            shards[module_name, shard] = StoredShard(name, storage, *shape, module.part("weight", shard))
    return shards
