"""Configurations of compressed-tensors, the format of llm-compressor.

Source: the package compressed-tensors, `QuantizationConfig` and its compressors.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanovllm.weights.quantization.fp8_storage import Fp8Storage
from nanovllm.weights.quantization.integers import PackedIntStorage, PlainIntStorage
from nanovllm.weights.quantization.rules import EVERY, REMEDY, ConfigSection, Quantization, Rule
from nanovllm.weights.quantization.storage import Storage

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def parse(section: ConfigSection) -> Quantization:
    """What a `quantization_config` of compressed-tensors says.

    Raises:
        ValueError: something is not supported; the message names the entry.
    """
    for name in ("sparsity_config", "transform_config"):
        found = section.get(name)
        if found and not (isinstance(found, dict) and found.get("format") == "dense"):
            section.fail(name, found, "none")
    status = section.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        section.fail("quantization_status", status, "'compressed'")
    if section.get("format") == "dense":
        return Quantization("compressed-tensors", (Rule(EVERY, None),))
    groups = ConfigSection(section.get("config_groups"), f"{section.where}.config_groups")
    named: list[Rule] = []
    rest: list[Rule] = []
    for name, group in groups.entries.items():
        of = ConfigSection(group, f"{groups.where}.{name}")
        storage = _storage(of, section)
        targets = of.patterns("targets")
        if not targets:
            of.fail("targets", group.get("targets"), "a list of names")
        patterns = tuple(target for target in targets if target != "Linear")
        named += [Rule(patterns, storage)] if patterns else []
        rest += [Rule(EVERY, storage)] if "Linear" in targets else []
    return Quantization("compressed-tensors", (Rule(section.patterns("ignore"), None), *named, *rest))


def _storage(group: ConfigSection, config: ConfigSection) -> Storage | None:
    """How the modules of a group are stored."""
    format = group.get("format", config.get("format"))
    if format == "dense" or group.get("weights") is None:
        return None
    if format not in _FORMATS:
        (group if group.get("format") else config).fail("format", format, ", ".join(_FORMATS))
    weights = ConfigSection(group.get("weights"), f"{group.where}.weights")
    kind = weights.one_of("type", ("int", "float"))
    if weights.get("dynamic"):
        weights.fail("dynamic", weights.get("dynamic"), "false")
    symmetric = weights.flag("symmetric", True)
    given = weights.get("group_size")  # from which the strategy follows where it is not named
    default = "tensor" if given is None else "channel" if given == -1 else "group"
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), default)
    group_size = weights.group_size("group_size") if strategy == "group" else 0
    if kind == "float":
        weights.one_of("num_bits", (8,))
        if format == "pack-quantized" or not symmetric:
            weights.fail("type", kind, f"'int' for format {format!r}, symmetric={symmetric}")
        return Fp8Storage("weight_scale", _block(weights, strategy, group_size), _quantises_activations(group))
    bits = weights.one_of("num_bits", (4, 8))
    if strategy == "block" or format == "float-quantized":
        weights.fail("strategy", strategy, f"'tensor', 'channel' or 'group' for integers, in format {format!r}")
    actorder = weights.get("actorder")
    actorder = str(actorder).lower() if actorder not in (False, None) else None
    if actorder not in (None, "weight", "static", "group", "dynamic", "true"):
        weights.fail("actorder", actorder, "null, 'weight' or 'group'")
    by_group = actorder in ("group", "dynamic", "true") and bool(group_size)
    if format == "pack-quantized":
        return PackedIntStorage(bits, group_size, symmetric, by_group, strategy == "tensor")
    if by_group:
        weights.fail("actorder", actorder, f"null or 'weight' for format {format!r}")
    return PlainIntStorage(bits, group_size, symmetric, strategy == "tensor")


def _quantises_activations(group: ConfigSection) -> bool:
    """Whether the activations of a group's modules are 8-bit floats, with scales of any kind."""
    of = group.get("input_activations")
    return isinstance(of, Mapping) and of.get("num_bits") == 8 and of.get("type", "int") == "float"


def _block(weights: ConfigSection, strategy: str, group_size: int) -> tuple[int, int]:
    if strategy == "block":
        return block_of(weights, "block_structure")
    if strategy == "group":
        if group_size % 128:
            weights.fail("group_size", group_size, "a multiple of 128 for 8-bit floats")
        return 1, group_size
    return (0, 0) if strategy == "tensor" else (1, 0)


def block_of(section: ConfigSection, name: str) -> tuple[int, int]:
    """(rows, columns) of the blocks that an entry names."""
    block = section.get(name)
    if isinstance(block, str):
        block = [int(n) if n.isdecimal() else n for n in block.split("x")]
    good = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not good or block[1] % 128:
        section.fail(name, block, "two positive integers, the second a multiple of 128", REMEDY)
    return block[0], block[1]
