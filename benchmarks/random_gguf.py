"""A GGUF file of a preset's shape with random weights, for speed beside llama.cpp.

    python -m benchmarks.random_gguf qwen3-0.6b Q4_K qwen3-0.6b-q4_k.gguf
    python bench.py --device cpu --engine nanovllm,llama.cpp --model qwen3-0.6b-q4_k.gguf

All matrices have the format that is named, the embedding too; norms are float32 ones. Quantised blocks are filled with
random codes, with scales that give weights a mean near 0 and a standard deviation near 0.02. The file has no
tokenizer: it takes token ids alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from nanovllm.models.model_presets import PRESETS, preset

FORMATS = ("BF16", "Q8_0", "Q4_K")
DEVIATION = 0.02
_ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


def write(path: Path, name: str, form: str, seed: int = 0) -> None:
    """Write the file.

    Raises:
        ValueError: the preset is no dense Qwen3 or Llama, or the format is none of `FORMATS`.
    """
    config = preset(name)
    architecture = _ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise ValueError(f"{name} is a {config['architectures'][0]}; choose one of {', '.join(_ARCHITECTURES)}")
    if form not in FORMATS:
        raise ValueError(f"format {form!r}: expected one of {', '.join(FORMATS)}")
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    rng = np.random.default_rng(seed)
    for tensor, shape in _shapes(config):
        if len(shape) == 1:
            writer.add_tensor(tensor, np.ones(shape, np.float32))
        else:
            writer.add_tensor(tensor, random_rows(rng, form, *shape), raw_dtype=Type[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(rng: np.random.Generator, form: str, rows: int, columns: int) -> np.ndarray:
    """Bytes of a random matrix, [rows, bytes of a row]."""
    block, size = gguf.GGML_QUANT_SIZES[Type[form]]
    if columns % block:
        raise ValueError(f"{form} has blocks of {block} columns, and a matrix has {columns}; choose another format")
    if form == "BF16":
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(DEVIATION)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    data = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    if form == "Q8_0":  # a scale and 32 codes: uniform in -128..127, whose deviation is 73.9
        data[..., :2] = _half(DEVIATION / 73.9)
    else:  # Q4_K, scale * s * q - minimum * m: uniform s and m of 6 bits, and q of 4, deviate by 258 from a mean of 0
        data[..., :2], data[..., 2:4] = _half(DEVIATION / 258), _half(7.5 * DEVIATION / 258)
    return data.reshape(rows, -1)


def _half(value: float) -> np.ndarray:
    return np.array([value], np.float16).view(np.uint8)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, q), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    if config["architectures"][0] == "Qwen3ForCausalLM":
        layer |= {"attn_q_norm": (size,), "attn_k_norm": (size,)}
    yield "token_embd.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in layer.items())
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, hidden)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS), metavar="PRESET", help="such as qwen3-0.6b")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        write(args.file, args.preset, args.format)
    except (ValueError, OSError) as error:  # such as a directory that does not exist
        print(f"random_gguf: {error}", file=sys.stderr)
        return 2
    print(f"written: {args.file}, {args.file.stat().st_size / 1e6:,.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
