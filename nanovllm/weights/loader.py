"""From a checkpoint to a model in device memory: where it is, how it is configured, and its weights, strictly.

Formats: safetensors (one file or sharded; memory-mapped), GGUF, and random weights. Pickle files are never opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from nanovllm.config import EngineConfig
from nanovllm.kernels import Kernels
from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.linear import ShardedParameters
from nanovllm.layers.parallel import SINGLE, TensorParallel
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_presets import PRESETS, preset
from nanovllm.models.registry import model_class
from nanovllm.weights import gguf


class WeightError(ValueError):
    """A checkpoint tensor that is missing, unexpected, of the wrong shape, not finite, or unreadable."""


@dataclass(frozen=True)
class Checkpoint:
    """A located model: its configuration, and where its weights are (None for a preset)."""

    config: ModelConfig
    path: Path | None
    format: str
    """"safetensors", "gguf" or "dummy"."""


def locate(config: EngineConfig) -> Checkpoint:
    """Find the model that `config.model` names and read its configuration.

    Raises:
        ValueError, FileNotFoundError: nothing is there, or something is missing or unsupported; the message says what.
    """
    path = Path(config.model).expanduser()
    dummy = config.load_format == "dummy"
    if path.suffix == ".gguf" or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"model={config.model!r}: no such file")
        if path.suffix != ".gguf":
            raise ValueError(
                f"model={config.model!r} is a file but no .gguf; pass the directory that holds config.json"
            )
        if config.load_format == "safetensors":
            raise ValueError(f'load_format="safetensors", but {path} is a GGUF file; use load_format="auto"')
        return Checkpoint(_parse(gguf.read_config(path)), path, "dummy" if dummy else "gguf")
    if config.load_format == "gguf":
        raise ValueError(f'load_format="gguf", but model={config.model!r} is no .gguf file')
    if not path.is_dir():
        if dummy and (config.model.lower() in PRESETS or "/" not in config.model):
            return Checkpoint(_parse(preset(config.model)), None, "dummy")
        path = _from_hub(config.model)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{path} holds no config.json; pass a Hugging Face model directory or a .gguf file")
    return Checkpoint(_parse(_read_config(config_file)), path, "dummy" if dummy else "safetensors")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file} is not valid JSON ({e}); download the model again") from e
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object; is it the configuration of a model?")
    return config


def _parse(config: Mapping[str, Any]) -> ModelConfig:
    # The architecture first: what else a config.json holds depends on it.
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        if isinstance(architecture, str):
            model_class(architecture)
    return ModelConfig.from_dict(config)


def _from_hub(model_id: str) -> Path:
    """A hub id's directory in the local cache, downloaded if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if model_id.lower() in PRESETS:
        raise ValueError(
            f"{model_id!r} is a preset (a shape without weights): for weights name a directory or the hub's id, such as"
            " 'Qwen/Qwen3-0.6B'; for random ones, in Python, load_format=\"dummy\""
        )
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        try:
            return Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(snapshot_download(model_id, allow_patterns=patterns))
    except HFValidationError as e:
        raise FileNotFoundError(f"model={model_id!r} is neither a directory, nor a .gguf file, nor a hub id") from e
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as e:
        raise FileNotFoundError(
            f"model={model_id!r} is no local directory, is not in the hub's local cache, and could not be downloaded"
            f" ({type(e).__name__}); pass a directory or a .gguf file, or download it first"
        ) from e


def load_model(
    checkpoint: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    tp: TensorParallel = SINGLE,
    seed: int = 0,
) -> DecoderForCausalLM:
    """Build the model on `device` and fill every parameter.

    Raises:
        WeightError: a tensor is missing, left over, of the wrong shape, not finite, or unreadable; the message names it.
    """
    with torch.device(device), _default_dtype(dtype):
        model = model_class(checkpoint.config.architecture)(checkpoint.config, max_position, kernels, tp)
    model.eval()
    if checkpoint.format == "dummy":
        fill_random(model, seed)
    else:
        read = gguf.iter_weights if checkpoint.format == "gguf" else iter_safetensors
        load_weights(model, read(checkpoint.path))
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fill_random(model: nn.Module, seed: int) -> None:
    """Random weights of a usual scale (norms 1, biases 0, all else normal with deviation 0.02)."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)


def iter_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every tensor of a checkpoint directory; tensors are memory-mapped, one at a time."""
    from safetensors import SafetensorError, safe_open

    for file in _safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as f:
                for name in f.keys():
                    yield name, f.get_tensor(name)
        except SafetensorError as e:
            raise WeightError(f"{file} is corrupt or truncated ({e}); download it again") from e
        except OSError as e:
            raise WeightError(f"{file} cannot be read ({e}); is it a file, and is it yours to read?") from e


def _safetensors_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise WeightError(f"{index} does not say which file holds which tensor ({e!r}); download it again") from e
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise WeightError(f"{index} names {', '.join(missing)}, not found in {path}; download the model again")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = [f.name for f in sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))]
        hint = (
            f" ({', '.join(pickled)} are pickle files, which are never opened; convert them to safetensors)"
            if pickled
            else ""
        )
        raise WeightError(f'{path} holds no .safetensors file{hint}; for random weights pass load_format="dummy"')
    return files


def load_weights(model: DecoderForCausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy checkpoint tensors into the model's fused, split parameters; every shard must be filled exactly once."""
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
    tied_head: torch.Tensor | None = None
    finite = _Finite()
    for name, tensor in weights:
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a buffer that old Llama checkpoints carry; it is computed
        module_name, _, parameter = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        fused, shard = model.FUSED.get(leaf, (leaf, ""))
        module_name = f"{parent}.{fused}" if parent else fused
        module = modules.get(module_name)
        if module is None or module._parameters.get(parameter) is None or shard not in module.shards:
            raise WeightError(f"unexpected tensor {name!r}: this {model.config.architecture} has no such weight")
        expected = module.source_shape(parameter, shard)
        if tuple(tensor.shape) != expected:
            raise WeightError(f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(expected)}")
        if not tensor.is_floating_point():
            raise WeightError(
                f"tensor {name!r} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected a floating-point one;"
                " quantised checkpoints are read from GGUF files only"
            )
        if tied and module_name == "lm_head":
            tied_head = tensor  # the same matrix as the embedding, stored twice: held against it below
            continue
        if (module_name, parameter, shard) not in missing:
            raise WeightError(f"tensor {name!r} occurs twice in the checkpoint")
        missing.remove((module_name, parameter, shard))
        finite.look_at(name, module.load_shard(parameter, shard, tensor))
    if missing:
        names = sorted(_checkpoint_name(model, *key) for key in missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise WeightError(f"the checkpoint lacks {', '.join(names[:3])}{more}")
    finite.check()
    if tied_head is not None and not _holds(model.lm_head, tied_head):
        raise WeightError(
            "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', but config.json says"
            " tie_word_embeddings=true; set it to false there, or remove the tensor"
        )


class _Finite:
    """Whether loaded weights are finite: the device reduces each as soon as it is there, and is waited for once, in the end."""

    def __init__(self) -> None:
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._extremes: list[torch.Tensor] = []

    def look_at(self, name: str, weight: torch.Tensor) -> None:
        if weight.numel():  # a rank may have no rows of a small vocabulary
            self._weights.append((name, weight))
            self._extremes += weight.aminmax()  # both are NaN if one of the values is

    def check(self) -> None:
        good = torch.stack(self._extremes).isfinite().view(-1, 2).all(1).tolist()
        bad = [weight for weight, is_good in zip(self._weights, good) if not is_good]
        if not bad:
            return
        name, weight = bad[0]
        count = weight.numel() - int(weight.isfinite().sum())
        dtype = str(weight.dtype).removeprefix("torch.")
        more = f" (such tensors in all: {len(bad)})" if len(bad) > 1 else ""
        beyond = '; if its values are beyond the 65504 of float16, pass dtype="bfloat16"' if dtype == "float16" else ""
        raise WeightError(
            f"tensor {name!r} holds NaN or infinity in {count} of {weight.numel()} values, as {dtype}{more}; the checkpoint is"
            f" damaged: download it again{beyond}"
        )


def _holds(module: LMHead, tensor: torch.Tensor) -> bool:
    """Whether the module's rows are the tensor's, compared a few at a time: it may be large and in host memory."""
    mine = tensor[module.start : module.start + len(module.weight)]
    parts = zip(mine.split(8192), module.weight[: len(mine)].split(8192))
    return all(torch.equal(part.to(weight), weight) for part, weight in parts)


def _checkpoint_name(model: DecoderForCausalLM, module_name: str, parameter: str, shard: str) -> str:
    parent, _, leaf = module_name.rpartition(".")
    original = {value: key for key, value in model.FUSED.items()}.get((leaf, shard), leaf)
    return ".".join(part for part in (parent, original, parameter) if part)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all distinct parameters."""
    return sum(math.prod(p.shape) * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
