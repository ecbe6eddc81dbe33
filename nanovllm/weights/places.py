"""Where the tensors of a checkpoint belong in a model, and which part of each a rank reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.packed_layers import Place
from nanovllm.weights.quantization.storage import StoredShard
from nanovllm.weights.safetensors_files import TensorHeader, WeightError

_CACHE_SCALE = re.compile(r"\.([qkv]|prob)_scale$|_proj\.([kv]|output)_scale$")

Shards = Mapping[tuple[str, str], StoredShard]
"""Packed shards by module and shard."""


def find_places(
    model: DecoderForCausalLM, headers: Sequence[TensorHeader], packed: Shards = MappingProxyType({})
) -> dict[str, Place]:
    """Where each of a checkpoint's tensors belongs in the model's fused, split parameters, by the tensor's name.

    Args:
        model: may be on the meta device, without memory.
        headers: the headers of all tensors in the checkpoint.
        packed: the shards of which it has other tensors than a `weight`.

    Raises:
        WeightError: a tensor is missing, unexpected, of the wrong shape or dtype, or doubled; the message names it.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, ShardedParameters)}
    missing = {
        (module_name, parameter, shard)
        for module_name, module in modules.items()
        for shard in module.shards
        for parameter in _expected(module, packed.get((module_name, shard)))
    }
    if model.config.tie_word_embeddings:
        missing.discard(("lm_head", "weight", ""))
    places: dict[str, Place] = {}
    of_planes = _places_of_planes(packed)
    for header in headers:
        if header.name.endswith("rotary_emb.inv_freq"):
            continue  # a buffer that old Llama checkpoints carry; it is computed
        if packed and _CACHE_SCALE.search(header.name):
            continue  # of a quantised KV cache; ours has no scales
        place = module_name, parameter, shard = model.place_of(header.name)
        module = modules.get(module_name)
        if header.name in places:
            raise WeightError(f"tensor {header.name!r} occurs twice in the checkpoint", header.name)
        if header.name in of_planes:
            module_name, _, shard = of_planes[header.name][0]
            _check_plane(header, parameter, packed[module_name, shard])
            if packed[module_name, shard].planes[parameter].read:
                places[header.name] = of_planes[header.name][0]
            missing -= set(of_planes[header.name])
            continue
        has_bias = module is not None and module._parameters.get("bias") is not None
        if parameter == "bias" and (module_name, shard) in packed and not has_bias:
            places[header.name] = place  # some libraries write zeros, which is checked when they are read
            continue
        if module is None or module._parameters.get(parameter) is None or shard not in module.shards:
            raise WeightError(
                f"unexpected tensor {header.name!r}: this {model.config.architecture} has no such weight", header.name
            )
        _check_plain(header, module.source_shape(parameter, shard))
        places[header.name] = place
        missing.discard(place)
    if missing:
        names = sorted({_checkpoint_name(model, packed, *place) for place in missing})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise WeightError(f"the checkpoint lacks {', '.join(names[:3])}{more}")
    return places


def _expected(module: ShardedParameters, packed: StoredShard | None) -> list[str]:
    """The last parts of the names of the tensors that a checkpoint must have for a module."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if packed is None:
        return names
    return [n for n in names if n != "weight"] + [n for n, plane in packed.planes.items() if plane.required]


def _places_of_planes(packed: Shards) -> dict[str, list[Place]]:
    """The places of the tensors of packed shards by name; shards that are stored as one share their tensors."""
    found: dict[str, list[Place]] = {}
    for (module, shard), stored in packed.items():
        for plane in stored.planes:
            found.setdefault(f"{stored.name}.{plane}", []).append((module, plane, shard))
    return found


def _check_plain(header: TensorHeader, expected: Sequence[int]) -> None:
    """A WeightError unless the tensor can be a parameter of that shape."""
    if header.shape != expected:
        raise WeightError(
            f"tensor {header.name!r} has shape {list(header.shape)}, expected {list(expected)}", header.name
        )
    if not header.is_float:
        raise WeightError(
            f"tensor {header.name!r} has dtype {header.dtype}, expected a floating-point one;"
            " a quantised checkpoint needs a quantization_config in config.json",
            header.name,
        )


def _check_plane(header: TensorHeader, name: str, packed: StoredShard) -> None:
    """A WeightError unless the tensor can be the plane of that name."""
    plane = packed.planes[name]
    what = f"tensor {header.name!r} of a matrix [{packed.rows}, {packed.columns}] stored as {packed.storage.label}"
    if header.shape not in plane.shapes:
        expected = " or ".join(str(list(shape)) for shape in plane.shapes)
        raise WeightError(f"{what} has shape {list(header.shape)}, expected {expected}", header.name)
    if header.dtype not in plane.dtypes:
        raise WeightError(f"{what} has dtype {header.dtype}, expected {' or '.join(plane.dtypes)}", header.name)


def parts_of(
    model: DecoderForCausalLM, places: Mapping[str, Place], packed: Shards = MappingProxyType({})
) -> dict[str, Part]:
    """What this rank reads of a checkpoint's tensors; tensors that are not in it are read whole."""
    parts: dict[str, Part] = {}
    for shard_of in packed.values():
        parts |= {f"{shard_of.name}.{plane}": part for plane, part in shard_of.plane_parts()}
    for name, (module_name, parameter, shard) in places.items():
        if (module_name, shard) in packed and parameter in packed[module_name, shard].planes:
            continue
        module = model.get_submodule(module_name)
        assert isinstance(module, ShardedParameters)
        if getattr(module, parameter) is None:  # zeros where a layer has no bias
            continue
        part = module.part(parameter, shard)
        if part is not None and part.length < module.source_shape(parameter, shard)[part.dim]:
            parts[name] = part
    return parts


def _checkpoint_name(model: DecoderForCausalLM, packed: Shards, module_name: str, parameter: str, shard: str) -> str:
    if (module_name, shard) in packed and parameter in packed[module_name, shard].planes:
        return f"{packed[module_name, shard].name}.{parameter}"
    return model.source_name(module_name, parameter, shard)
