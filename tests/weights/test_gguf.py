"""GGUF files: written with the `gguf` package, read with ours, compared with transformers' own loader."""

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as V
from gguf import quants

from nanovllm.model_config import ModelConfig
from nanovllm.weights import gguf as ours
from nanovllm.weights.gguf_file import TENSOR_TYPES, GGUFError, GGUFFile
from nanovllm.weights.tokenizer import eos_token_ids, load_tokenizer

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER, LAYERS, VOCAB = 4, 2, 64, 256, 512, 2, 96
QUANTISABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
NOT_QUANTISABLE = sorted({name for name, _, _ in TENSOR_TYPES.values()} - {"F32", "F16", "BF16", *QUANTISABLE})


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


def write(path: Path, arch: str, tensors: dict[str, np.ndarray], quant: str = "F32", **extra: object) -> Path:
    """A GGUF file of `tensors`; matrices are stored as `quant`. extra: metadata under the architecture's prefix, the
    value's type deciding how it is stored; None removes a key."""
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, object] = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INTER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 50000.0,
    }  # fmt: skip
    for key, value in (keys | extra).items():
        key = f"{arch}.{key}" if key in keys or not key.startswith(("tokenizer.", "split.")) else key
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
        kind = Q[quant] if tensor.ndim == 2 and quant != "F32" else None
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(path: Path, arch: str = "llama", quant: str = "F32", **extra: object) -> Path:
    return write(path / "tiny.gguf", arch, to_gguf(arch, hf_weights(arch)), quant, **extra)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_round_trip_is_exact_in_float32(tmp_path: Path, arch: str, tied: bool) -> None:
    weights = hf_weights(arch, tied)
    path = write(tmp_path / "x.gguf", arch, to_gguf(arch, weights))
    loaded = dict(ours.iter_tensors(path))
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert loaded[name].dtype == torch.float32
        np.testing.assert_array_equal(loaded[name].numpy(), weight, err_msg=name)
    assert ours.read_config(path)["tie_word_embeddings"] is tied


@pytest.mark.parametrize("quant", ["F16", "BF16"])
def test_half_precision_keeps_its_dtype(tmp_path: Path, quant: str) -> None:
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[quant]
    loaded = dict(ours.iter_tensors(tiny(tmp_path, quant=quant)))
    for name, weight in hf_weights("llama").items():
        expected = torch.from_numpy(weight).to(dtype if weight.ndim == 2 else torch.float32)
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("quant", QUANTISABLE)
def test_quantised_weights(tmp_path: Path, quant: str) -> None:
    weights = hf_weights("llama")
    stored = to_gguf("llama", weights)
    loaded = dict(ours.iter_tensors(tiny(tmp_path, quant=quant)))
    expected = quants.dequantize(quants.quantize(stored["blk.1.attn_v.weight"], Q[quant]), Q[quant])
    np.testing.assert_array_equal(loaded["model.layers.1.self_attn.v_proj.weight"].numpy(), expected)
    # Blocks of different rows are permuted as wholes, so the original is near wherever permutation was undone rightly.
    for name, weight in weights.items():
        error = np.abs(loaded[name].numpy() - weight).max()
        assert error < {"4": 0.5, "5": 0.25, "8": 0.03}[quant[1]] * (weight.ndim == 2) + 1e-7, (name, error)


@pytest.mark.parametrize("quant", NOT_QUANTISABLE)
def test_blocks_without_a_python_quantiser(tmp_path: Path, quant: str) -> None:
    """Random blocks: every bit pattern is a valid block, if its float16 scales are finite."""
    _, block, block_bytes = next(entry for entry in TENSOR_TYPES.values() if entry[0] == quant)
    raw = np.random.default_rng(1).integers(0, 0x3C, (HIDDEN, INTER // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for key, value in (("block_count", 1), ("attention.head_count", HEADS), ("attention.head_count_kv", KV_HEADS)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=Q[quant])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [(name, tensor)] = ours.iter_tensors(tmp_path / "x.gguf")
    assert name == "model.layers.0.mlp.down_proj.weight" and tensor.shape == (HIDDEN, INTER)
    expected = quants.dequantize(raw, Q[quant])
    assert np.isfinite(expected).all() and np.unique(expected).size > 8
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for type_id, (name, block, block_bytes) in TENSOR_TYPES.items():
        assert Q(type_id).name == name and gguf.GGML_QUANT_SIZES[Q(type_id)] == (block, block_bytes)


def test_attention_bias_is_permuted_too(tmp_path: Path) -> None:
    weights = hf_weights("llama")
    biases = {f"model.layers.{i}.self_attn.{x}_proj.bias": np.arange(n * HEAD_DIM, dtype=np.float32)
              for i in range(LAYERS) for x, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}  # fmt: skip
    path = write(tmp_path / "x.gguf", "llama", to_gguf("llama", weights | biases))
    loaded = dict(ours.iter_tensors(path))
    for name, bias in biases.items():
        np.testing.assert_array_equal(loaded[name].numpy(), bias, err_msg=name)
    assert ours.read_config(path)["attention_bias"] is True


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    before = path.read_bytes()
    for _, tensor in ours.iter_tensors(path):
        tensor.zero_()
    assert path.read_bytes() == before


# ---- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_config(tmp_path: Path, arch: str) -> None:
    config = ours.read_config(tiny(tmp_path, arch))
    assert config["architectures"] == [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]]
    assert config["model_type"] == arch
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (HIDDEN, INTER, LAYERS)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        HEADS,
        KV_HEADS,
        HEAD_DIM,
    )
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 50000.0)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCAB, 128)
    assert "rope_scaling" not in config and config["attention_bias"] is False


def test_head_dim_that_is_not_hidden_over_heads(tmp_path: Path) -> None:
    keys = {"attention.key_length": 96, "attention.value_length": 96}
    assert ours.read_config(tiny(tmp_path, "qwen3", **keys))["head_dim"] == 96
    keys = {"attention.key_length": None, "attention.value_length": None}
    assert ours.read_config(tiny(tmp_path, "llama", **keys))["head_dim"] == HIDDEN // HEADS


def test_several_end_tokens(tmp_path: Path) -> None:
    path = tiny(tmp_path, **{"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2})
    assert ours.read_config(path)["eos_token_id"] == [2, 5]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
             "rope.scaling.yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, keys: dict[str, object], expected: dict[str, object] | None) -> None:
    assert ours.read_config(tiny(tmp_path, **keys)).get("rope_scaling") == expected


def test_rope_frequency_factors_are_read_and_are_no_weight(tmp_path: Path) -> None:
    factors = np.linspace(1, 32, HEAD_DIM // 2, dtype=np.float32)
    tensors = to_gguf("llama", hf_weights("llama")) | {"rope_freqs.weight": factors}
    path = write(tmp_path / "x.gguf", "llama", tensors)
    assert ours.read_config(path)["rope_scaling"] == {"rope_type": "freq_factors", "factors": factors.tolist()}
    assert dict(ours.iter_tensors(path)).keys() == hf_weights("llama").keys()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "longrope"}, r"longrope.*supported: none, linear, yarn"),
        ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0"),
        ({"expert_count": 8}, r"expert_count is 8; mixture-of-experts"),
        ({"rope.dimension_count": 32}, r"rope\.dimension_count is 32, unlike the head size 64"),
        ({"block_count": None}, r"'llama\.block_count' is missing"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv differs between layers: \[2, 1\]"),
        ({"attention.head_count": 0}, r"head_count is 0"),
        ({"embedding_length": 256.0}, r"'llama\.embedding_length' is 256\.0, which is no int"),
        ({"rope.freq_base": "big"}, r"'llama\.rope\.freq_base' is 'big', which is no float"),
        ({"split.count": 3}, r"one of 3 parts; join them first"),
    ],
)
def test_unsupported_metadata(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    path = tiny(tmp_path, **keys)
    with pytest.raises(GGUFError, match=message) as error:
        ours.read_config(path)
    assert str(path) in str(error.value)


def test_equal_numbers_per_layer_are_one_number(tmp_path: Path) -> None:
    path = tiny(tmp_path, **{"attention.head_count_kv": [KV_HEADS] * LAYERS})
    assert ours.read_config(path)["num_key_value_heads"] == KV_HEADS
    assert len(dict(ours.iter_tensors(path))) == len(hf_weights("llama"))


def test_rope_frequency_factors_of_the_wrong_kind(tmp_path: Path) -> None:
    good = to_gguf("llama", hf_weights("llama"))
    for factors, message in (
        (np.ones(3, np.float32), r"rope_freqs\.weight.*F32 \[3\], not F32 \[32\]"),
        (np.zeros(HEAD_DIM // 2, np.float32), "not positive and finite"),
    ):
        path = write(tmp_path / "x.gguf", "llama", good | {"rope_freqs.weight": factors})
        with pytest.raises(GGUFError, match=message):
            ours.read_config(path)


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "gemma3", {"token_embd.weight": np.zeros((4, 8), np.float32)})
    for read in (ours.read_config, ours.iter_tensors):
        with pytest.raises(GGUFError, match=r"'gemma3', which is not supported; supported: llama, qwen3"):
            read(path)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.weight", f"blk.{LAYERS}.attn_q.weight", "blk.0.attn_q_norm.weight",
             "blk.0.attn_norm.bias",
             "output_norm.bias", "wibble", "blk.0.attn_q.scale"]
)  # fmt: skip
def test_unknown_tensor(tmp_path: Path, name: str) -> None:
    tensors = to_gguf("llama", hf_weights("llama")) | {name: np.zeros(HEAD_DIM, np.float32)}
    path = write(tmp_path / "x.gguf", "llama", tensors)
    # When it is called, not at the first tensor: nothing may have been loaded by then.
    with pytest.raises(GGUFError, match=rf"{name}.*\(F32, \[{HEAD_DIM}\]\) has no place in a llama model"):
        ours.iter_tensors(path)


def test_unsupported_quantisation(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 54), np.uint8), raw_dtype=Q.TQ1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        GGUFError, match=r"'token_embd.weight' has ggml type 34 \(TQ1_0\).*use a file quantised as one of F32"
    ):
        ours.read_config(tmp_path / "x.gguf")


def test_heads_that_do_not_fit_the_rows(tmp_path: Path) -> None:
    path = tiny(tmp_path, **{"attention.head_count": 7})
    with pytest.raises(GGUFError, match=r"'blk\.0\.attn_q\.weight' has 256 rows, which 7 heads"):
        list(ours.iter_tensors(path))


def test_missing_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quantised = tiny(tmp_path), tmp_path / "q.gguf"
    write(quantised, "llama", to_gguf("llama", hf_weights("llama")), "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert len(dict(ours.iter_tensors(plain))) == len(hf_weights("llama"))
    with pytest.raises(ImportError, match=r"q\.gguf.*pip install gguf"):
        ours.iter_tensors(quantised)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"\x00" * 64])
def test_wrong_magic(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=r"x\.gguf: does not start with the magic bytes 'GGUF'"):
        GGUFFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        ours.read_config(tmp_path / "none.gguf")


def test_version_and_byte_order(tmp_path: Path) -> None:
    content = bytearray(tiny(tmp_path).read_bytes())
    for version, message in ((struct.pack("<I", 1), "version 1"), (struct.pack(">I", 3), "big-endian")):
        content[4:8] = version
        (tmp_path / "v.gguf").write_bytes(content)
        with pytest.raises(GGUFError, match=message):
            GGUFFile(tmp_path / "v.gguf")


def test_truncation_anywhere_is_noticed(tmp_path: Path) -> None:
    content = tiny(tmp_path).read_bytes()
    end_of_header = content.index(b"blk.1.ffn_down") + 64
    path = tmp_path / "t.gguf"
    for size in [*range(4, end_of_header, 7), len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError, match="truncated"):
            GGUFFile(path)


@pytest.mark.parametrize(
    "last, said",
    [
        (struct.pack("<Q", 100) + b"short", r"is truncated: metadata 'a' ends at byte 165, the file has 70"),
        (struct.pack("<I", 3), r"is truncated: metadata 'a' ends at byte 65, the file has 61"),
        (struct.pack("<Q", 2) + b"\xff\xfe", r"metadata 'a' is not UTF-8"),
    ],
)
def test_damaged_strings_of_an_array(tmp_path: Path, last: bytes, said: str) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 2)
    path = tmp_path / "s.gguf"
    path.write_bytes(header + struct.pack("<Q", 0) + last)
    with pytest.raises(GGUFError, match=said):
        GGUFFile(path)


def test_truncation_names_tensor_and_sizes(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    content = path.read_bytes()
    info = list(GGUFFile(path).tensors.values())[-1]
    path.write_bytes(content[: info.offset + 4])
    end, size = info.offset + info.nbytes, info.offset + 4
    with pytest.raises(GGUFError, match=rf"{info.name}.*ends at byte {end}, the file has {size}; download it again"):
        ours.iter_tensors(path)


@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x02, 0x03, 0x0C, 0x0D, 0x0E])
def test_no_damaged_byte_escapes_as_another_error(tmp_path: Path, mask: int) -> None:
    """A single wrong byte is either harmless or a GGUFError: no crash, no hang, no huge allocation."""
    weights = {"token_embd.weight": np.ones((4, 8), np.float32), "blk.0.attn_q.weight": np.ones((256, 2), np.float32)}
    content = write(
        tmp_path / "x.gguf", "llama", weights, **{"rope.scaling.type": "linear", "split.count": 1}
    ).read_bytes()
    path = tmp_path / "d.gguf"
    refused = 0
    for position in range(4, len(content) - 2048):
        damaged = bytearray(content)
        damaged[position] ^= mask
        path.write_bytes(damaged)
        try:
            ours.read_config(path)
            for _ in ours.iter_tensors(path):
                pass
        except GGUFError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"byte {position}") from error
    assert refused > 300


def test_blocks_that_do_not_divide_the_row(tmp_path: Path) -> None:
    path = tiny(tmp_path, quant="Q8_0")
    content = bytearray(path.read_bytes())
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    assert struct.unpack_from("<QQ", content, at) == (HIDDEN, VOCAB)
    struct.pack_into("<Q", content, at, 100)
    path.write_bytes(content)
    with pytest.raises(
        GGUFError, match=r"'token_embd.weight' of shape \[96, 100\] cannot be Q8_0, whose blocks are 32"
    ):
        GGUFFile(path)


# ---- wrong types -----------------------------------------------------------------------------------------------------

WRONG = [
    (7, V.UINT32), (2**63, V.UINT64), (-3, V.INT32), (0.5, V.FLOAT32), (float("nan"), V.FLOAT32), (True, V.BOOL),
    ("x", V.STRING), ("{% for", V.STRING), ([1, 2], V.ARRAY), (["a", "b"], V.ARRAY), ([[1], [2]], V.ARRAY),
]  # fmt: skip
KEYS = [
    "general.architecture", "general.alignment", "split.count", "llama.block_count", "llama.context_length",
    "llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count",
    "llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.rope.dimension_count",
    "llama.expert_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "llama.rope.scaling.attn_factor", "llama.rope.scaling.original_context_length", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_space_prefix",
    "tokenizer.chat_template",
]  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_the_wrong_type_is_an_error_that_names_file_and_key(tmp_path: Path, key: str, model: str) -> None:
    """Whatever stands under a key, reading gives a configuration and a tokenizer, or one ValueError."""
    for number, (value, kind) in enumerate(WRONG):
        path = tmp_path / f"{number}.gguf"
        write_with_tokenizer(path, model, key, value, kind)
        try:
            ModelConfig.from_dict(ours.read_config(path))
        except ValueError as error:
            assert str(path) in str(error) or "config.json" in str(error), f"{key}={value!r}: {error}"
        try:
            load_tokenizer(path)
            eos_token_ids(path)
        except ValueError as error:
            assert str(path) in str(error), f"{key}={value!r}: {error}"


def write_with_tokenizer(path: Path, model: str, key: str, value: object, kind: V) -> None:
    """A file without layers that could be read, but for one key."""
    pieces = ["<unk>", "a", "b", "ab"]
    keys: dict[str, tuple[object, V]] = {
        "llama.block_count": (LAYERS, V.UINT32), "llama.context_length": (128, V.UINT32),
        "llama.embedding_length": (8, V.UINT32), "llama.feed_forward_length": (16, V.UINT32),
        "llama.attention.head_count": (2, V.UINT32), "llama.attention.layer_norm_rms_epsilon": (1e-5, V.FLOAT32),
        "tokenizer.ggml.model": (model, V.STRING), "tokenizer.ggml.tokens": (pieces, V.ARRAY),
        "tokenizer.ggml.merges": (["a b"], V.ARRAY), "tokenizer.ggml.unknown_token_id": (0, V.UINT32),
    }  # fmt: skip
    keys[key] = value, kind
    writer = gguf.GGUFWriter(path, "llama")
    if key == "general.architecture":
        writer.kv_data[0].pop("general.architecture")
    for name, (content, value_type) in keys.items():
        writer.add_key_value(name, content, value_type)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
