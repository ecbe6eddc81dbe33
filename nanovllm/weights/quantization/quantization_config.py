"""From a checkpoint's configuration to how each of its modules is stored."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.weights.json_file import read_json
from nanovllm.weights.quantization import compressed_tensors
from nanovllm.weights.quantization.fp8_storage import Fp8Storage
from nanovllm.weights.quantization.integers import AwqStorage, GptqStorage
from nanovllm.weights.quantization.rules import EVERY, REMEDY, ConfigSection, Quantization, Rule
from nanovllm.wording import brief

_OWN_FILES = ("quantize_config.json", "quant_config.json")
"""Where older versions of AutoGPTQ and AutoAWQ say what others say in config.json."""


def read(config: Mapping[str, Any], directory: Path) -> Quantization | None:
    """How a checkpoint is quantised; None: it is not.

    Args:
        config: its config.json.
        directory: where that is.

    Raises:
        ValueError: it is in a way that is not supported; the message names the file, the entry and a remedy.
    """
    foreign = directory / "hf_quant_config.json"
    found = config.get("quantization_config")
    if found:
        return parse(ConfigSection(found, f"{directory / 'config.json'}: quantization_config"))
    if foreign.is_file():
        entries = ConfigSection(read_json(foreign).get("quantization"), f"{foreign}: quantization").entries
        return parse(ConfigSection({"quant_method": "modelopt"} | dict(entries), f"{foreign}: quantization"))
    for name in _OWN_FILES:
        if (directory / name).is_file():
            entries = read_json(directory / name)
            method = "gptq" if name == "quantize_config.json" else "awq"
            return parse(ConfigSection({"quant_method": method} | dict(entries), str(directory / name)))
    return None


def parse(section: ConfigSection) -> Quantization:
    """What a `quantization_config` says.

    Raises:
        ValueError: as `read`.
    """
    method = section.first("quant_method")
    if method is None and "config_groups" in section.entries:
        method = "compressed-tensors"
    parser = _PARSERS.get(method) if isinstance(method, str) else None
    if parser is None:
        raise ValueError(
            f"{section.where}: quant_method={brief(method, 60)} is not supported; supported are"
            f" {', '.join(sorted(_PARSERS))}; {REMEDY}"
        )
    return parser(section)


def _fp8(section: ConfigSection) -> Quantization:
    section.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    section.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    if section.get("weight_block_size") is None:
        storage = Fp8Storage("weight_scale", (0, 0))
    else:
        storage = Fp8Storage("weight_scale_inv", compressed_tensors.block_of(section, "weight_block_size"))
    return Quantization("fp8", (_not_converted(section), Rule(EVERY, storage)))


def _fbgemm(section: ConfigSection) -> Quantization:
    return Quantization("fbgemm_fp8", (_not_converted(section), Rule(EVERY, Fp8Storage("weight_scale", (1, 0)))))


def _modelopt(section: ConfigSection) -> Quantization:
    section.one_of("quant_algo", ("FP8",))
    patterns = section.patterns("ignore", "exclude_modules")
    kept = tuple(f"re:{fnmatch.translate(name)}" if "*" in name else name for name in patterns)
    return Quantization("modelopt", (Rule(kept, None), Rule(EVERY, Fp8Storage("weight_scale", (0, 0)))))


def _awq(section: ConfigSection) -> Quantization:
    version = str(section.get("version", "gemm")).lower()
    if version != "gemm":
        section.fail("version", section.get("version"), "'gemm'")
    bits = section.first("bits", "w_bit")
    if bits != 4:
        section.fail("bits", bits, "4")
    zero_point = section.flag("zero_point", True)
    storage = AwqStorage(4, section.group_size("group_size", "q_group_size"), zero_point)
    return Quantization("awq", (_not_converted(section), Rule(EVERY, storage)))


def _gptq(section: ConfigSection) -> Quantization:
    rules = [_not_converted(section)]
    form = str(section.first("checkpoint_format", "format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2") or section.get("is_marlin_format"):
        section.fail("checkpoint_format", "marlin" if section.get("is_marlin_format") else form, "'gptq' or 'gptq_v2'")

    section.one_of("pack_dtype", ("int32", "torch.int32"), "int32")

    def storage(of: ConfigSection) -> GptqStorage:
        merged = ConfigSection({**section.entries, **of.entries}, of.where)
        bits = merged.one_of("bits", (4, 8))
        merged.flag("sym", True)  # either way the zero points are in the file
        desc_act = merged.flag("desc_act", False)
        return GptqStorage(bits, merged.group_size("group_size"), desc_act, form == "gptq")

    dynamic = ConfigSection(section.get("dynamic", {}) or {}, f"{section.where}.dynamic")
    for pattern, changes in dynamic.entries.items():
        regex = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
        dynamic.check_regex(pattern, regex)
        changed = None if pattern.startswith("-:") else storage(ConfigSection(changes, f"{dynamic.where}[{pattern!r}]"))
        rules.append(Rule((f"re:{regex}",), changed))
    if not section.flag("lm_head", False):
        rules.append(Rule(("lm_head",), None))
    return Quantization("gptq", (*rules, Rule(EVERY, storage(ConfigSection({}, section.where)))))


def _not_converted(section: ConfigSection) -> Rule:
    """The modules that the configuration leaves as they are."""
    return Rule(section.patterns("modules_to_not_convert", "ignored_layers"), None)


_PARSERS: dict[str, Callable[[ConfigSection], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "compressed-tensors": compressed_tensors.parse,
}
