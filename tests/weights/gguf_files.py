"""Small GGUF files for tests, written with the `gguf` package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import quants

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER, LAYERS, VOCAB = 4, 2, 64, 256, 512, 2, 96


@contextmanager
def read_quickly() -> Iterator[None]:
    """Within the block transformers reads a GGUF file in a fraction of the time.

    It reads the file twice: for the configuration and for the tensors. It makes the table of tensors' names anew for
    every module of the model, and each of a vocabulary's 100,000 strings is a slice of a memory map, which costs
    several times as much as one of an array.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map))
        patch.setattr(gguf, "GGUFReader", lru_cache(gguf.GGUFReader))
        array = type("array", (), {"__new__": lambda cls, path, **options: np.fromfile(path, np.uint8)})
        patch.setattr(np, "memmap", array)  # a type: other code asks whether its arrays are of it
        yield


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k of a Llama."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def hf_weights(arch: str, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights in Hugging Face's names and layout."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": (INTER, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTER, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTER),
        }
        if arch == "qwen3":
            shapes |= {prefix + f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def to_gguf(arch: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under GGUF's names and in its layout, through the `gguf` package's own table of names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA if arch == "llama" else gguf.MODEL_ARCH.QWEN3, LAYERS)
    result = {}
    for name, weight in weights.items():
        if arch == "llama" and "q_proj" in name:
            weight = permute(weight, HEADS)
        elif arch == "llama" and "k_proj" in name:
            weight = permute(weight, KV_HEADS)
        result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight
    return result


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    quant: str | Callable[[str], str] = "F32",
    blocks: dict[str, np.ndarray] | None = None,
    tensors_a_part: int = 0,
    **extra: object,
) -> Path:
    """A GGUF file of `tensors`; matrices are stored as `quant`, in `blocks` if those are given.

    tensors_a_part: the model is cut into several files, of which the path names none; 0: into one.

    quant: the type of all matrices, or from a tensor's name to its type.

    extra: metadata under the architecture's prefix. The value's type decides how it is stored; None removes a key.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_a_part)
    keys: dict[str, object] = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INTER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 50000.0,
    }  # fmt: skip
    for key, value in (keys | extra).items():
        key = f"{arch}.{key}" if key in keys or not key.startswith(("tokenizer.", "split.", "general.")) else key
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        of_this = quant if isinstance(quant, str) else quant(name)
        kind = Q[of_this] if tensor.ndim == 2 and of_this != "F32" else None
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            stored = blocks[name] if blocks else quants.quantize(tensor, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
    finish(writer)
    return path


def tiny(path: Path, arch: str = "llama", quant: str = "F32", **extra: object) -> Path:
    return write(path / "tiny.gguf", arch, to_gguf(arch, hf_weights(arch)), quant, **extra)


def quantised(path: Path, arch: str, quant: str | Callable[[str], str], tied: bool = True, **extra: object) -> Path:
    """A file of random weights in any format; the blocks of those that the package cannot write are random.

    extra: as of `write`.
    """
    tensors = to_gguf(arch, hf_weights(arch, tied))
    try:
        return write(path, arch, tensors, quant, **extra)
    except (NotImplementedError, KeyError):
        return _write_random_blocks(path, arch, tensors, quant, **extra)


def _write_random_blocks(
    path: Path, arch: str, tensors: dict[str, np.ndarray], quant: str | Callable[[str], str], **extra: object
) -> Path:
    """As `write`, with blocks of random bits and small scales."""
    places = {"Q2_K": (80, 82), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "Q8_0": (0,)}
    rng = np.random.default_rng(1)
    blocks: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            of_this = quant if isinstance(quant, str) else quant(name)
            width, size = gguf.GGML_QUANT_SIZES[Q[of_this]]
            halves = places[of_this]
            raw = rng.integers(0, 256, (tensor.shape[0], tensor.shape[1] // width, size), dtype=np.uint8)
            for at in halves:
                scales = rng.uniform(0.001, 0.02, raw.shape[:2]).astype(np.float16)
                raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
            blocks[name] = raw.reshape(tensor.shape[0], -1)
    return write(path, arch, tensors, quant, blocks=blocks, **extra)
