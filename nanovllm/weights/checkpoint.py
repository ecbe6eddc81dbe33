"""Where a model is and how it is configured: a directory, a .gguf file, a hub id, or a preset's name."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import ONLINE_QUANTIZATION as ONLINE
from nanovllm.config import EngineConfig
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import PRESETS, preset
from nanovllm.models.model_registry import model_class
from nanovllm.quiet_import import quiet_imports
from nanovllm.weights import gguf
from nanovllm.weights.gguf_file import GGUFFile, open_gguf
from nanovllm.weights.json_file import read_json
from nanovllm.weights.model_path import nearest, nowhere, path_of
from nanovllm.weights.quantization import quantization_config
from nanovllm.weights.quantization.rules import Quantization
from nanovllm.weights.safetensors_files import SECOND_COPY, Rename
from nanovllm.weights.text_part import text_entries, text_tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A located model: its configuration, and where its weights are (None for a preset)."""

    config: ModelConfig
    path: Path | None
    format: str
    """"safetensors", "gguf" or "dummy"."""
    header: GGUFFile | None = field(default=None, repr=False, compare=False)
    """The header of a .gguf file. Parsing it takes 0.05 s or more, so it is kept for the stages of a start."""
    quantization: Quantization | None = None
    """How the files are quantised, as config.json says it."""
    online: str | None = None
    """How weights are quantised while they are loaded: one of `ONLINE_QUANTIZATION`; None: they are not."""
    online_head: str | None = None
    """The same of the LM head, if it has a form of its own: "fp8" or "int8"."""
    activation_quantization: bool = True
    """As of `EngineConfig`."""
    rename: Rename = str
    """From the names of tensors in safetensors files to those in the model."""


def locate(config: EngineConfig) -> Checkpoint:
    """Find the model that `config.model` names and read its configuration.

    Raises:
        ValueError, FileNotFoundError: nothing is there, or something is missing or unsupported; the message says what.
    """
    path = path_of(config.model)
    dummy = config.load_format == "dummy"
    checkpoint = partial(
        Checkpoint, online_head=config.lm_head_quantization, activation_quantization=config.activation_quantization
    )
    if path.suffix == ".gguf" or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"model={config.model!r}: no such file")
        if path.suffix != ".gguf":
            raise ValueError(
                f"model={config.model!r} is a file but no .gguf; pass the directory that holds config.json"
            )
        if config.load_format == "safetensors":
            raise ValueError(f'load_format="safetensors", but {path} is a GGUF file; use load_format="auto"')
        header, online = open_gguf(path), _online(config.quantization, None, path)
        model = _parse(gguf.read_config(path), path, config.hf_overrides)
        return checkpoint(model, path, "dummy" if dummy else "gguf", header, online=online)
    if config.load_format == "gguf":
        raise ValueError(f'load_format="gguf", but model={config.model!r} is no .gguf file')
    if not path.is_dir():
        if dummy and "/" not in config.model:
            if config.model.lower() not in PRESETS:
                raise ValueError(_no_shape(config.model))
            online = _online(config.quantization, None, path)
            model = ModelConfig.from_dict(_overridden(preset(config.model), config.hf_overrides))
            return checkpoint(model, None, "dummy", online=online)
        path = _from_hub(config.model)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{path} holds no config.json; pass a Hugging Face model directory or a .gguf file")
    entries = read_json(config_file)
    model = _parse(entries, config_file, config.hf_overrides)
    quantization = quantization_config.read(entries, path)
    online = _online(config.quantization, quantization, path)
    rename: Rename = str
    if entries["architectures"] != [model.architecture]:
        logger.info("%s: of %s the model of text is loaded", path, entries["architectures"][0])
        rename = text_tensor
    return checkpoint(model, path, "dummy" if dummy else "safetensors", None, quantization, online, rename=rename)


def _online(asked: str | None, quantization: Quantization | None, path: Path) -> str | None:
    """How a model is quantised while it is loaded.

    Raises:
        ValueError: `asked` contradicts what the checkpoint's configuration says.
    """
    if asked is None or (asked == "gguf" and path.suffix == ".gguf"):
        return None
    if quantization is not None:
        if asked in (quantization.method, f"{quantization.method}_marlin"):
            return None
        remedy = "leave the argument out"
        raise ValueError(f"quantization={asked!r}: {path} is quantised already ({quantization.method}); {remedy}")
    if asked not in ONLINE:
        raise ValueError(
            f"quantization={asked!r}: {path} is not quantised in that way; leave the argument out, or pass "
            f"{' or '.join(ONLINE)} to quantise it while it is loaded"
        )
    return asked


def _overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A config.json with some entries replaced."""
    found = {**config, **(overrides or {})}
    if not overrides or "rope_scaling" not in overrides or "rope_parameters" in overrides:
        return found
    old = found.pop("rope_parameters", None)  # what transformers 5 writes: the scaling, and the base frequency
    if isinstance(old, Mapping) and old.get("rope_theta") is not None and "rope_theta" not in overrides:
        found["rope_theta"] = old["rope_theta"]
    return found


def _parse(config: Mapping[str, Any], file: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The configuration that a file holds; errors name the file and the entry."""
    try:
        config = _overridden(text_entries(config) or config, overrides)
        # The architecture first: what else a config.json holds depends on it.
        architectures = config.get("architectures")
        for architecture in architectures if isinstance(architectures, list) else ():
            if isinstance(architecture, str):
                model_class(architecture)
        return ModelConfig.from_dict(config)
    except ValueError as e:
        message = str(e)
        where = message if message.startswith("config.json") else f"config.json: {message}"
        raise ValueError(str(file) + where.removeprefix("config.json")) from e


def _from_hub(model_id: str) -> Path:
    """A hub id's directory in the local cache, downloaded if it is not there."""
    if model_id.startswith((".", "/", "~")):
        raise FileNotFoundError(nowhere(model_id))
    with quiet_imports():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if model_id.lower() in PRESETS:
        raise ValueError(
            f"{model_id!r} is a preset (a shape without weights): for weights name a directory or the hub's id, such as"
            " 'Qwen/Qwen3-0.6B'; for random ones pass load_format=\"dummy\" (to `LLM` or `nanovllm serve` only)"
        )
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    download = partial(snapshot_download, model_id, allow_patterns=patterns, ignore_patterns=[SECOND_COPY])
    try:
        try:
            return Path(download(local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(download())
    except HFValidationError:
        raise FileNotFoundError(nowhere(model_id)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as e:
        raise FileNotFoundError(
            f"model={model_id!r} is no local directory, is not in the hub's local cache, and could not be downloaded"
            f": {_why_not(e)}; or pass a directory or a .gguf file"
        ) from None  # the hub's own traceback is a page long and says no more


def _no_shape(name: str) -> str:
    """What is said of a name that is to give a model's shape, and gives none."""
    near = nearest(name, PRESETS)
    remedy = f"did you mean {near!r}?" if near else f"presets are {', '.join(PRESETS)}"
    return f"model={name!r} is no local directory, and no preset (the shape of a published model); {remedy}"


def _why_not(error: Exception) -> str:
    """Why the hub gave no files, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "the model is gated; ask for access on its page, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is a private one; correct the name, or set HF_TOKEN"
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set; unset it"
    cause: BaseException = error
    while cause.__cause__ is not None:  # the hub's own words for a network that fails do not say how
        cause = cause.__cause__
    said = (str(cause).splitlines() or [""])[0]
    if isinstance(cause, OSError) and cause.errno in _NOT_WRITTEN:
        return f"the files cannot be kept ({type(cause).__name__}: {said}); free space, or set HF_HOME elsewhere"
    return f"the hub did not answer as expected ({type(cause).__name__}: {said}); check the connection"


_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
