"""GGUF files: written with the `gguf` package, read with ours, compared with transformers' own loader."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants

from nanovllm.weights import gguf as ours
from nanovllm.weights.gguf_file import TENSOR_TYPES, GGUFError
from tests.weights.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    finish,
    hf_weights,
    tiny,
    to_gguf,
    write,
)

QUANTISABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


NOT_QUANTISABLE = sorted({name for name, _, _ in TENSOR_TYPES.values()} - {"F32", "F16", "BF16", *QUANTISABLE})


@pytest.mark.parametrize("arch, tied", [("llama", True), ("qwen3", False)])
def test_round_trip_is_exact_in_float32(tmp_path: Path, arch: str, tied: bool) -> None:
    weights = hf_weights(arch, tied)
    path = write(tmp_path / "x.gguf", arch, to_gguf(arch, weights))
    loaded = dict(ours.iter_tensors(path))
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert loaded[name].dtype == torch.float32
        np.testing.assert_array_equal(loaded[name].numpy(), weight, err_msg=name)
    assert ours.read_config(path)["tie_word_embeddings"] is tied


def test_half_precision_keeps_its_dtype(tmp_path: Path) -> None:
    for quant, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        loaded = dict(ours.iter_tensors(tiny(tmp_path, quant=quant)))
        for name, weight in hf_weights("llama").items():
            expected = torch.from_numpy(weight).to(dtype if weight.ndim == 2 else torch.float32)
            assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected), name


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
    finish(writer)
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_of_the_mapped_file_one_stored_matrix_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Else a process takes the file twice while it packs the matrices."""

    def mapped() -> int:
        return next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if "RssFile" in x)

    size = 8 << 20
    tensors = to_gguf("llama", hf_weights("llama"))
    tensors |= {name: np.ones((size // HIDDEN // 4, HIDDEN), np.float32) for name in tensors if "ffn_" in name}
    path = write(tmp_path / "m.gguf", "llama", {n: t for n, t in tensors.items() if "norm" not in n})
    before, most, sizes = mapped(), 0, []
    for _, _, tensor in ours.iter_stored(path):
        sizes.append(int((tensor == 1).sum()) * 4)
        most = max(most, mapped() - before)
    assert sizes.count(size) == 3 * LAYERS
    assert size <= 1024 * most < 2 * size


def test_config(tmp_path: Path) -> None:
    for arch, architecture in (("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")):
        config = ours.read_config(tiny(tmp_path, arch))
        expected = dict(
            architectures=[architecture], model_type=arch, hidden_size=HIDDEN, intermediate_size=INTER,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
            rms_norm_eps=1e-5, rope_theta=50000.0, vocab_size=VOCAB, max_position_embeddings=128, attention_bias=False,
        )  # fmt: skip
        assert expected.items() <= config.items() and "rope_scaling" not in config


@pytest.mark.parametrize(
    ("keys", "entry", "expected"),
    [
        ({"attention.key_length": 96, "attention.value_length": 96}, "head_dim", 96),
        ({"attention.key_length": None, "attention.value_length": None}, "head_dim", HIDDEN // HEADS),
        ({"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}, "eos_token_id", [2, 5]),
        ({"tokenizer.ggml.eom_token_id": 7}, "eos_token_id", [2, 7]),
        ({"attention.head_count_kv": [KV_HEADS] * LAYERS}, "num_key_value_heads", KV_HEADS),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "rope_scaling", None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "rope_scaling",
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scale_linear": 2.0}, "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
             "rope.scaling.yarn_beta_fast": 16.0}, "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_entries_that_follow_from_keys(tmp_path: Path, keys: dict[str, object], entry: str, expected: object) -> None:
    assert ours.read_config(tiny(tmp_path, **keys)).get(entry) == expected


def test_rope_frequency_factors_are_read_and_are_no_weight(tmp_path: Path) -> None:
    factors = np.linspace(1, 32, HEAD_DIM // 2, dtype=np.float32)
    tensors = to_gguf("llama", hf_weights("llama")) | {"rope_freqs.weight": factors}
    path = write(tmp_path / "x.gguf", "llama", tensors)
    assert ours.read_config(path)["rope_scaling"] == {"rope_type": "freq_factors", "factors": factors.tolist()}
    assert dict(ours.iter_tensors(path)).keys() == hf_weights("llama").keys()
    for wrong, said in (
        (np.ones(3, np.float32), r"rope_freqs\.weight.*F32 \[3\], not F32 \[32\]"),
        (np.zeros(HEAD_DIM // 2, np.float32), "not positive and finite"),
    ):
        with pytest.raises(GGUFError, match=said):
            ours.read_config(write(tmp_path / "x.gguf", "llama", tensors | {"rope_freqs.weight": wrong}))


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
    ],
)
def test_unsupported_metadata(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    path = tiny(tmp_path, **keys)
    with pytest.raises(GGUFError, match=message) as error:
        ours.read_config(path)
    assert str(path) in str(error.value)


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "mamba", {"token_embd.weight": np.zeros((4, 8), np.float32)})
    for read in (ours.read_config, ours.iter_tensors):
        with pytest.raises(GGUFError, match=r"'mamba', which is not supported; supported: gemma2, gemma3, llama"):
            read(path)


def test_unknown_tensor(tmp_path: Path) -> None:
    known = to_gguf("llama", hf_weights("llama"))
    for name in (
        "blk.0.attn_sinks.weight", f"blk.{LAYERS}.attn_q.weight", "blk.0.attn_norm.bias", "output_norm.bias", "wibble",
        "blk.0.attn_q.scale",
    ):  # fmt: skip
        path = write(tmp_path / "x.gguf", "llama", known | {name: np.zeros(HEAD_DIM, np.float32)})
        # When it is called, not at the first tensor: nothing may have been loaded by then.
        with pytest.raises(GGUFError, match=rf"{name}.*\(F32, \[{HEAD_DIM}\]\) has no place in a llama model"):
            ours.iter_tensors(path)


def test_unsupported_quantisation(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 292), np.uint8), raw_dtype=Q.Q8_K)
    finish(writer)
    with pytest.raises(
        GGUFError, match=r"'token_embd.weight' has ggml type 15 \(Q8_K\).*use a file quantised as one of F32"
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
