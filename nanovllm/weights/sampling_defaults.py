"""What a model's makers recommend for sampling: the defaults of requests that do not say otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.arguments import did_you_mean
from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.json_file import read_json
from nanovllm.wording import brief

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""In the file -> in `SamplingParams`. vLLM takes the same ones."""
_GGUF_NAMES = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Under "general.sampling." in a GGUF file, as llama.cpp writes them."""


class SamplingDefaults(NamedTuple):
    """Defaults, by the names of `SamplingParams`, and the files or arguments that they are from."""

    values: dict[str, Any]
    source: str

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"requests that do not set them take {said}, from {self.source}" if said else ""


def sampling_defaults(config: EngineConfig, checkpoint: Checkpoint) -> SamplingDefaults:
    """What the model's files, or those that `generation_config` names, and `override_generation_config` say.

    Raises:
        ValueError, FileNotFoundError: a file is not there, or a value cannot be a default.
    """
    found, source = _from_files(config, checkpoint)
    override = dict(config.override_generation_config or {})
    for name in override:
        if name not in _NAMES:
            remedy = did_you_mean(name, _NAMES) or f"known are {', '.join(_NAMES)}"
            raise ValueError(f"override_generation_config: {name!r} is not known; {remedy}")
    sources = [source] * any(name not in override for name in found) + ["override_generation_config"] * bool(override)
    for where, given in ((source, found), ("override_generation_config", override)):
        for name, value in given.items():
            try:
                SamplingParams(**{_NAMES[name]: value})
            except ValueError as error:
                _, _, why = str(error).partition(": ")
                ignored = '; generation_config="vllm" ignores the file' if given is found else ""
                raise ValueError(f"{where}: {name}={brief(value)}: {why}{ignored}") from None
    values = {_NAMES[name]: value for name, value in (found | override).items()}
    defaults = SamplingDefaults(values, " and ".join(sources))
    if values:
        logger.info("%s", defaults)
    return defaults


def _from_files(config: EngineConfig, checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """(what there is of `_NAMES`, where)"""
    path = checkpoint.path
    if config.generation_config == "vllm":
        return {}, ""
    if config.generation_config != "auto":
        path = Path(config.generation_config).expanduser()
        if not (path / FILE).is_file():
            raise FileNotFoundError(
                f"generation_config={config.generation_config!r}: must be auto, vllm (no defaults), or a directory that"
                f" holds {FILE}"
            )
    elif checkpoint.header is not None:
        header, prefix = checkpoint.header, "general.sampling."
        named = {name: header.field(prefix + key, float) for key, name in _GGUF_NAMES.items()}
        # 0.6 is stored in 32 bits.
        kept = {n: v if isinstance(v, int) else float(f"{v:.7g}") for n, v in named.items() if v is not None}
        return kept, header.path.name
    if path is None or not (path / FILE).is_file():
        return {}, ""
    entries = read_json(path / FILE)
    return {name: entries[name] for name in _NAMES if entries.get(name) is not None}, str(path / FILE)
