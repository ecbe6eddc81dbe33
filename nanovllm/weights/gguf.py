"""GGUF checkpoints of the architectures in `gguf_families`, in Hugging Face's names and layout.

`gguf_file` reads the container; block dequantisation is the `gguf` package's, imported when a file needs it.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.layers.linear import Part
from nanovllm.weights.gguf_families import FAMILIES
from nanovllm.weights.gguf_file import TENSOR_TYPES, GGUFError, GGUFFile, TensorInfo, open_gguf
from nanovllm.weights.safetensors_files import NO_PARTS, TensorHeader
from nanovllm.wording import brief

__all__ = ["GGUFError", "iter_tensors", "read_config", "read_headers"]

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GLOBAL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_Dequantize = Callable[[np.ndarray, str], np.ndarray]


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint's configuration in the form of a Hugging Face config.json.

    `rope_scaling` is present where the file asks for it: `linear` and `yarn` from the metadata, and
    `{"rope_type": "freq_factors", "factors": [head_dim / 2 floats]}` for Llama 3 files, which store the divisor of each
    inverse frequency as a tensor. `eos_token_id` is a list where the file names an end of turn or of message as well.

    Raises GGUFError for a damaged file, an unsupported architecture or feature; FileNotFoundError.
    """
    file = open_gguf(path)
    arch = _architecture(file)

    def value(key: str, default: Any = None, kind: type = int) -> Any:
        return _number(file, key, default, kind)

    hidden_size, num_heads = value("embedding_length"), value("attention.head_count")
    if num_heads <= 0:
        raise file.error(f"{arch}.attention.head_count is {num_heads}")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    family = FAMILIES[arch]
    for key in ("attention.value_length", *(() if family.partial else ("rope.dimension_count",))):
        if value(key, head_dim) != head_dim:
            raise file.error(f"{arch}.{key} is {value(key)}, unlike the head size {head_dim}", "it is not supported")
    if value("expert_count", 0):
        raise file.error(f"{arch}.expert_count is {value('expert_count')}", "mixture-of-experts is not supported")
    if "token_embd.weight" not in file.tensors:
        raise file.error("tensor 'token_embd.weight' is missing")
    config = {
        "architectures": [family.architecture],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": value("rope.freq_base", family.rope_theta, float),
        "max_position_embeddings": value("context_length"),
        # The embedding's rows, not llama.vocab_size: files padded after training disagree, and the rows are what is
        # there.
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _eos_token_id(file),
    }
    config |= family.entries(value, config)
    scaling = _long_rope(file) if family.partial else _rope_scaling(file, head_dim)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def read_headers(path: str | os.PathLike[str]) -> list[TensorHeader]:
    """Every weight's Hugging Face name and shape, from the file's header alone.

    Raises GGUFError for a damaged file or an unknown tensor.
    """
    file = open_gguf(path)
    return [
        TensorHeader(hf_name, info.shape, info.type, True, info.path, name)
        for name, hf_name in _hf_names(file, _architecture(file)).items()
        for info in [file.tensors[name]]
    ]


def iter_tensors(
    path: str | os.PathLike[str],
    parts: Mapping[str, Part] = NO_PARTS,
    packed: Container[str] = (),
    release: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight as (Hugging Face name, tensor in Hugging Face layout), one at a time, in file order.

    A tensor that is named in `parts` is that part alone: of a quantised one, only the blocks that hold it are expanded.
    A quantised matrix that is named in `packed` is uint8 [rows, bytes of a row]: its blocks, in the order of the
    weights; a part of its columns must have whole blocks.

    F32, F16 and BF16 tensors keep their dtype and are backed by the mapped file (copy-on-write: writing to them leaves
    the file as it is); every quantised type is expanded to float32. The order of rows that GGUF conversion gives
    Llama's q and k, so that rotary pairs lie next to each other, is undone. With `release` what was written to a tensor
    is lost when the next one is taken, and its pages of the file leave this process's memory.

    The whole file is checked when this is called, before the first tensor is yielded. Raises GGUFError for a damaged
    file, an unknown tensor or an unsupported type; ImportError if a quantised file needs the missing `gguf` package.
    """
    file = open_gguf(path)
    arch = _architecture(file)
    num_heads = _number(file, "attention.head_count")
    num_kv_heads = _number(file, "attention.head_count_kv", num_heads)
    permuted = {"attn_q": num_heads, "attn_k": num_kv_heads} if FAMILIES[arch].permuted else {}
    names = _hf_names(file, arch)
    dequantize: _Dequantize | None = None
    if any(file.tensors[n].type not in _PLAIN_DTYPES and hf_name not in packed for n, hf_name in names.items()):
        dequantize = _dequantizer(str(file.path))

    def generate() -> Iterator[tuple[str, torch.Tensor]]:
        maps: dict[Path, tuple[mmap.mmap, np.ndarray]] = {}
        for name, hf_name in names.items():
            info = file.tensors[name]
            mapping, data = maps.get(info.path) or maps.setdefault(info.path, _map(info.path))
            part = parts.get(hf_name)
            if hf_name in packed:
                tensor = _read_blocks(data, info, part)
            else:
                tensor = _read_tensor(data, info, dequantize, part)
            heads = permuted.get(name.split(".")[-2])
            if heads is not None:
                if part is not None:
                    heads = heads * part.length // info.shape[0]  # a part has whole heads
                tensor = _undo_permutation(file, info, tensor, heads)
            yield hf_name, tensor
            if release and hasattr(mmap, "MADV_DONTNEED"):
                begin = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapping.madvise(mmap.MADV_DONTNEED, begin, info.offset + info.nbytes - begin)

    return generate()


def iter_stored(path: str | os.PathLike[str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every weight as (Hugging Face name, format, tensor), with the blocks of quantised matrices as they are stored.

    Formats have the names of `gguf_file.TENSOR_TYPES`. Everything else is as from `iter_tensors` with `release`.
    Raises GGUFError and ImportError as that does.
    """
    headers = {header.name: header for header in read_headers(path)}
    blocks = {name for name, h in headers.items() if len(h.shape) == 2 and h.dtype not in _PLAIN_DTYPES}
    for name, tensor in iter_tensors(path, packed=blocks, release=True):
        yield name, headers[name].dtype, tensor


def block_size(format: str) -> tuple[int, int]:
    """(weights, bytes) of a block of a format that `iter_stored` names."""
    return next((weights, nbytes) for name, weights, nbytes in TENSOR_TYPES.values() if name == format)


def dequantized(blocks: torch.Tensor, format: str) -> torch.Tensor:
    """The blocks of a matrix, uint8 [rows, bytes of a row], as float32 [rows, columns]."""
    return torch.from_numpy(_dequantizer("a tensor")(blocks.numpy(), format))


def _architecture(file: GGUFFile) -> str:
    arch = file.field("general.architecture", str)
    if arch not in FAMILIES:
        raise file.error(
            f"general.architecture is {arch!r}, which is not supported",
            f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return arch


def _number(file: GGUFFile, key: str, default: Any = None, kind: type = int) -> Any:
    """The number under `key` of the file's architecture: an int, or with `kind=float` either. Raises GGUFError if it is
    something else, or missing without a default."""
    key = f"{file.metadata['general.architecture']}.{key}"
    found = file.metadata.get(key, default)
    if isinstance(found, list):  # some files give a number per layer
        if any(value != found[0] for value in found) or not found:
            raise file.error(f"{key} differs between layers: {brief(found, 60)}", "such models are not supported")
        found = found[0]
    if found is None:
        raise file.error(f"metadata key {key!r} is missing", "convert the model again")
    if isinstance(found, bool) or not isinstance(found, (int, kind)):
        raise file.error(
            f"metadata key {key!r} is {brief(found, 60)}, which is no {kind.__name__}", "convert the model again"
        )
    if isinstance(found, float) and not math.isfinite(found):
        raise file.error(f"metadata key {key!r} is {found!r}", "convert the model again")
    # Stored in float32: take the shortest decimal that float32 cannot tell from it (1e-05, not 9.99999974e-06).
    return float(str(np.float32(found))) if isinstance(found, float) else found


def _eos_token_id(file: GGUFFile) -> int | list[int] | None:
    ids = [file.field(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(token for token in ids if token is not None))
    return unique if len(unique) > 1 else (unique[0] if unique else None)


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """The scaling of rotary frequencies (yarn: https://arxiv.org/abs/2309.00071), None if there is none."""
    prefix = f"{file.metadata['general.architecture']}.rope.scaling."
    kind = file.field(prefix + "type", str, "linear")  # llama.cpp's own default, with a factor of 1
    factor = _number(file, "rope.scaling.factor", _number(file, "rope.scale_linear", 0.0, float), float) or 1.0
    scaling: dict[str, Any] | None = None
    if kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = _number(file, "rope.scaling.original_context_length", _number(file, "context_length"))
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}yarn_{name}" in file.metadata:
                scaling[name] = _number(file, f"rope.scaling.yarn_{name}", kind=float)
        # Converters and versions of llama.cpp disagree on what these scale: better no answer than a wrong one.
        neutrals = {"attn_factor": 1, "yarn_attn_factor": 1, "yarn_ext_factor": 1, "yarn_log_multiplier": 0}
        for name, neutral in neutrals.items():
            if file.field(prefix + name, float, neutral) != neutral:
                raise file.error(f"{prefix}{name} is {file.metadata[prefix + name]}", f"only {neutral} is supported")
    elif kind not in ("linear", "none"):
        raise file.error(f"{prefix}type is {kind!r}", "supported: none, linear, yarn")
    info = file.tensors.get(_ROPE_FREQS)
    if info is None:
        return scaling
    if scaling:
        raise file.error(f"has both the tensor {_ROPE_FREQS!r} and rope scaling {kind!r}", "only one is supported")
    return {"rope_type": "freq_factors", "factors": _frequencies(file, _ROPE_FREQS, head_dim // 2)}


def _long_rope(file: GGUFFile) -> dict[str, Any] | None:
    """LongRoPE, whose two sets of factors Phi-3 files have as tensors; None without these."""
    if _LONG_FACTORS not in file.tensors:
        return None
    if _SHORT_FACTORS not in file.tensors:
        raise file.error(f"tensor {_SHORT_FACTORS!r} is missing beside {_LONG_FACTORS!r}")
    count = file.tensors[_LONG_FACTORS].shape[0]
    scaling = {
        "rope_type": "longrope",
        "long_factor": _frequencies(file, _LONG_FACTORS, count),
        "short_factor": _frequencies(file, _SHORT_FACTORS, count),
    }
    attention_factor = _number(file, "rope.scaling.attn_factor", 0.0, float)
    return scaling | ({"attention_factor": attention_factor} if attention_factor else {})


def _frequencies(file: GGUFFile, name: str, count: int) -> list[float]:
    """A tensor with a factor for each frequency."""
    info = file.tensors[name]
    if info.type != "F32" or info.shape != (count,):
        raise file.error(f"tensor {name!r} is {info.type} {list(info.shape)}, not F32 [{count}]")
    factors = _read_tensor(_map(info.path)[1], info, None).tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise file.error(f"tensor {name!r} holds a factor that is not positive and finite")
    return factors


def _hf_names(file: GGUFFile, arch: str) -> dict[str, str]:
    """The Hugging Face name of every tensor that is a weight."""
    num_layers = _number(file, "block_count")
    no_weights = (_ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS)
    return {name: _hf_name(file, arch, num_layers, name) for name in file.tensors if name not in no_weights}


def _hf_name(file: GGUFFile, arch: str, num_layers: int, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and int(match[1]) < num_layers:
        module = FAMILIES[arch].layer_tensors.get(match[2])
        may_have_bias = module is not None and module.endswith("_proj")
        prefix = f"model.layers.{int(match[1])}."
    else:
        module, may_have_bias, prefix = _GLOBAL_TENSORS.get(stem), False, ""
    if module is None or not (kind == "weight" or (kind == "bias" and may_have_bias)):
        info = file.tensors[name]
        raise file.error(
            f"tensor {name!r} ({info.type}, {list(info.shape)}) has no place in a {arch} model with {num_layers=}",
            "such a variant of the architecture is not supported",
        )
    return f"{prefix}{module}.{kind}"


def _map(path: Path) -> tuple[mmap.mmap, np.ndarray]:
    with path.open("rb") as opened:  # copy-on-write, since torch has no read-only tensors
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return mapping, np.frombuffer(mapping, np.uint8)


def _read_tensor(
    data: np.ndarray, info: TensorInfo, dequantize: _Dequantize | None, part: Part | None = None
) -> torch.Tensor:
    raw = data[info.offset : info.offset + info.nbytes]
    dtype = _PLAIN_DTYPES.get(info.type)
    if dtype is not None:
        if info.offset % dtype.itemsize:  # torch wants elements at multiples of their size
            raw = raw.copy()
        tensor = torch.from_numpy(raw).view(dtype).reshape(info.shape)
        return tensor if part is None else part.of(tensor)  # the rest of the mapped file is not read
    assert dequantize is not None
    blocks = raw.reshape(*info.shape[:-1], -1)
    if part is None:
        return torch.from_numpy(dequantize(blocks, info.type)).reshape(info.shape)
    if part.dim == 0 and len(info.shape) == 2:
        return torch.from_numpy(dequantize(blocks[part.start : part.start + part.length], info.type))
    weights, nbytes = block_size(info.type)
    first, last = part.start // weights, -(-(part.start + part.length) // weights)
    expanded = torch.from_numpy(dequantize(blocks[..., first * nbytes : last * nbytes], info.type))
    return expanded.narrow(-1, part.start - first * weights, part.length)


def _read_blocks(data: np.ndarray, info: TensorInfo, part: Part | None) -> torch.Tensor:
    """The blocks of a quantised matrix, or of a part of it: uint8 [rows, bytes of a row]."""
    blocks = torch.from_numpy(data[info.offset : info.offset + info.nbytes]).view(info.shape[0], -1)
    if part is None or part.dim == 0:
        return blocks if part is None else part.of(blocks)
    weights, nbytes = block_size(info.type)
    return blocks.narrow(1, part.start // weights * nbytes, part.length // weights * nbytes)


def _undo_permutation(file: GGUFFile, info: TensorInfo, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[heads * (pairs, 2)] rows back to [heads * (2, pairs)]: the inverse of `LlamaModel.permute` of llama.cpp's
    convert_hf_to_gguf.py. Rotary pairs are (2i, 2i + 1) there and (i, i + head_dim / 2) here."""
    rows = tensor.shape[0]
    if num_heads <= 0 or rows % (2 * num_heads):
        raise file.error(f"tensor {info.name!r} has {rows} rows, which {num_heads} heads of even size cannot share")
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _dequantizer(what: str) -> _Dequantize:
    """what: the subject of the error, if the gguf package is missing."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ImportError(f"{what} is quantised, and reading it needs the gguf package: pip install gguf") from error
    return lambda blocks, type_name: quants.dequantize(blocks, GGMLQuantizationType[type_name])
