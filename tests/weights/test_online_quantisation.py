"""Weights that are quantised while they are loaded: how exact they are, and where they are taken."""

import logging

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.layers.stored_matrices import Fp8Matrix
from nanovllm.models.packed_decoder import PackedDecoderForCausalLM
from nanovllm.weights.cpu_blocks import as_gguf
from nanovllm.weights.gguf import dequantized
from nanovllm.weights.quantization.k_quants import more_bits, to_k_quants
from nanovllm.weights.quantization.online import group_size, to_fp8, to_fp8_blocks, to_int
from tests import tiny
from tests.weights.test_quantised_checkpoints import GREEDY, OPTIONS, PACKED, packed_names, prompts


def drawn(rows, columns, dtype=torch.float32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype) * 0.05


@pytest.mark.parametrize(
    "shape, dtype",
    [((128, 128), torch.float32), ((200, 130), torch.bfloat16), ((1, 1), torch.float32), ((37, 129), torch.bfloat16)],
)
def test_fp8_is_within_a_step_of_the_weight(shape, dtype):
    weight = drawn(*shape, dtype)
    rows, blocks = to_fp8(weight), to_fp8_blocks(weight)
    assert rows.scale.shape == (shape[0], 1) and blocks.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for matrix, scale in (
        (rows, rows.scale), (blocks, blocks.by_row().scale.repeat_interleave(128, 1)[:, : shape[1]]),
    ):  # fmt: skip
        error = (matrix.dequantised() - weight.float()).abs()
        # Three bits of mantissa: half a step is 1/16 of the value, or half of the least subnormal number.
        assert matrix.shape == shape
        assert (error <= (weight.float().abs() / 16).maximum(scale * 2**-10) * 1.001).all()
    assert (rows.weight.float().abs().amax(1) == 448).all()  # each row uses the whole range, and each block
    for i in range(0, shape[0], 128):
        assert blocks.weight[i : i + 128, :128].float().abs().max() == 448
    whole = torch.cat([weight, 3 * weight], 1)
    part = to_fp8(weight, largest_of=lambda largest: largest.maximum(to_fp8(3 * weight).scale * 448))
    assert torch.equal(part.dequantised(), to_fp8(whole).dequantised()[:, : shape[1]])


@pytest.mark.parametrize("to_fp8", [to_fp8, to_fp8_blocks])
def test_the_whole_range_and_zeros(to_fp8):
    weight = torch.zeros(256, 256)
    weight[:128, 128:], weight[128:, :128] = 3e38, 1e-42
    matrix = to_fp8(weight)
    assert matrix.not_finite() == 0 and (matrix.dequantised()[:128, 128:] - 3e38).abs().max() < 1e32
    assert (matrix.dequantised()[128:, 128:] == 0).all()
    least = to_fp8(torch.eye(128) * 1e-44)  # of which 448th parts are 0
    assert least.not_finite() == 0 and (least.dequantised() == 0).all()
    for bits in (4, 8):
        packed = to_int(weight.clamp(max=1e30), bits, 64)
        assert packed.not_finite() == 0 and packed.scale.dtype == torch.float32
        assert torch.allclose(packed.dequantised()[:128, 128:], torch.tensor(1e30), rtol=0.01)


@pytest.mark.parametrize("bits, group", [(4, 128), (4, 32), (8, 128), (8, 16)])
def test_no_scale_of_the_usual_rule_is_better(bits, group):
    weight = drawn(48, 256, seed=bits)
    matrix = to_int(weight, bits, group)
    assert matrix.scale.dtype == torch.float16 and matrix.group_size == group and matrix.zero is None
    groups = weight.unflatten(1, (-1, group))
    top = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(-1, keepdim=True) / top).half().float()
    usual = (groups / scale).round().clamp(-top - 1, top) * scale
    error = (matrix.dequantised().unflatten(1, (-1, group)) - groups).square().sum(-1)
    assert (error <= (usual - groups).square().sum(-1) * 1.0001).all()
    assert error.sum() < (usual - groups).square().sum() * (0.95 if bits == 4 else 1.0)


def test_groups_follow_the_columns():
    assert [group_size(n) for n in (256, 576, 96, 80, 81)] == [128, 64, 32, 16, None]
    with pytest.raises(ValueError, match="81 columns cannot be in groups of 16"):
        to_int(drawn(2, 81), 4, 16)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_the_cpu_kernels_hold_the_same_numbers(bits):
    pytest.importorskip("gguf")
    matrix = to_int(drawn(24, 256), bits, 64)
    kind, blocks = as_gguf(matrix)
    assert kind == {4: "Q4_0", 8: "Q8_0"}[bits]
    assert torch.equal(dequantized(blocks, kind), matrix.dequantised())
    assert as_gguf(to_int(drawn(24, 48), bits, 16)) is None
    assert as_gguf(to_fp8(drawn(24, 48))) is None
    assert isinstance(to_fp8(drawn(2, 2)), Fp8Matrix)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("floats")
    tiny.save(path, "qwen3", hidden_size=128, intermediate_size=256, head_dim=32)
    return path


def tokens(llm):
    return [c.token_ids for o in llm.generate(prompts(), GREEDY, use_tqdm=False) for c in o.outputs]


@pytest.mark.parametrize("form", ["fp8", "int4", "int8"])
def test_engines_serve_the_same_quantised_weights(directory, form, caplog):
    """Packed, expanded, and by the C++ kernels: float32 has no rounding, so tokens are the same."""
    with caplog.at_level(logging.INFO, "nanovllm.weights"):
        packed = LLM(str(directory), quantization=form, **OPTIONS, **PACKED)
    assert len(packed_names(packed.engine.runner.model)) == 8
    said = " ".join(r.message for r in caplog.records)
    assert f"quantised matrices: 14 x {form} in" in said and "bits each" in said
    want = tokens(packed)
    assert tokens(LLM(str(directory), quantization=form, use_custom_kernels=False, **OPTIONS)) == want
    served = LLM(str(directory), quantization=form, **OPTIONS)
    assert tokens(served) == want
    model = served.engine.runner.model
    if isinstance(model, PackedDecoderForCausalLM) and form != "fp8":
        assert model.weights.layers[0].up.format == {"int4": "Q4_0", "int8": "Q8_0"}[form]
    assert want != tokens(LLM(str(directory), **OPTIONS))


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_random_weights_take_the_argument(directory, form):
    options = OPTIONS | dict(load_format="dummy", dtype="bfloat16")
    llm = LLM(str(directory), quantization=form, **options, **PACKED)
    model = llm.engine.runner.model
    assert len(packed_names(model)) == 8
    assert model.read_bytes_of_a_weight < 1.2  # the head is bfloat16
    assert all(len(ids) == GREEDY.max_tokens for ids in tokens(llm))


def test_random_weights_of_a_quantised_checkpoint_are_of_the_nearest_form(tmp_path):
    from tests.weights.quantised_files import FORMATS, write

    write(tmp_path, FORMATS["mixed"])
    llm = LLM(str(tmp_path), load_format="dummy", **OPTIONS, **PACKED)
    assert {m.matrices[0].op for m in llm.engine.runner.model.modules() if hasattr(m, "matrices")} == {"linear_int4"}
    assert EngineConfig(str(tmp_path)).quantization is None


@pytest.mark.parametrize("kind, most", [("Q4_K", 0.078), ("Q6_K", 0.02)])
def test_k_quants_are_what_the_gguf_package_reads(kind, most):
    pytest.importorskip("gguf")
    for seed, offset in ((0, 0.0), (1, 0.05)):
        weight = drawn(24, 512, seed=seed) + offset
        weight[3, :256], weight[4] = 0, weight[4] * 1000
        matrix = to_k_quants(weight, kind)
        assert matrix.shape == (24, 512) and matrix.not_finite() == 0
        assert torch.equal(dequantized(matrix.weight, kind), matrix.dequantised())
        assert (matrix.dequantised() - weight).norm(dim=1).div(weight.norm(dim=1)).max() < most * 1.1
        assert (matrix.dequantised()[3, :256] == 0).all()
    with pytest.raises(ValueError, match="96 columns cannot be in blocks of 256"):
        to_k_quants(drawn(2, 96), kind)


@pytest.mark.parametrize("tied", [False, True])
def test_the_mixture_of_q4_k_m(tmp_path, tied):
    """By the layers of 8, and of 16, that llama.cpp gives more bits."""
    assert [i for i in range(16) if more_bits(i, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    layers = dict(num_hidden_layers=8, head_dim=64, tie_word_embeddings=tied)
    tiny.save(tmp_path, "llama", hidden_size=256, intermediate_size=256, **layers)
    packed = LLM(str(tmp_path), quantization="q4_k_m", **OPTIONS, **PACKED)
    model = packed.engine.runner.model
    more = [i for i, layer in enumerate(model.model.layers) if "Q6_K" in layer.mlp.down_proj.weight.matrices[0].kind]
    values = [i for i, layer in enumerate(model.model.layers) if len(layer.self_attn.qkv_proj.weight.matrices) == 2]
    assert more == values == [0, 3, 6, 7]
    assert model.lm_head.weight.matrices[0].kind == "Q6_K/planes"
    assert model.model.embed_tokens.weight.matrices[0].kind == ("Q6_K/planes" if tied else "Q4_K/planes")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert tokens(packed) == tokens(LLM(str(tmp_path), quantization="q4_k_m", **OPTIONS))


@pytest.mark.parametrize("form, head, tied", [(None, "fp8", True), ("int4", "int8", False), ("q4_k_m", "fp8", True)])
def test_a_quantised_head(tmp_path, form, head, tied):
    tiny.save(tmp_path, "qwen3", hidden_size=256, intermediate_size=256, tie_word_embeddings=tied, head_dim=64)
    arguments = dict(quantization=form, lm_head_quantization=head)
    packed = LLM(str(tmp_path), **arguments, **OPTIONS, **PACKED)
    model = packed.engine.runner.model
    assert model.lm_head.weight.matrices[0].op == f"linear_{head}"
    embedding = model.model.embed_tokens.weight
    assert embedding is not model.lm_head.weight and hasattr(embedding, "matrices") == (form == "q4_k_m")
    want = tokens(packed)
    assert want == tokens(LLM(str(tmp_path), **arguments, **OPTIONS))  # by the C++ kernels
    assert want == tokens(LLM(str(tmp_path), use_custom_kernels=False, **arguments, **OPTIONS))
    dummy = dict(load_format="dummy", **arguments, **OPTIONS)
    assert tokens(LLM(str(tmp_path), **dummy)) == tokens(LLM(str(tmp_path), **dummy, **PACKED))


def test_a_file_that_is_quantised_already_is_named_by_its_most_frequent_type(tmp_path):
    gguf_files = pytest.importorskip("tests.weights.gguf_files")
    path = gguf_files.quantised(tmp_path / "m.gguf", "llama", lambda name: "Q8_0" if "token_embd" in name else "Q4_0")
    with pytest.raises(ValueError, match="quantization='fp8': .* is quantised already .GGUF Q4_0.; leave the"):
        LLM(str(path), quantization="fp8", **OPTIONS)


def test_a_head_that_is_quantised_already(tmp_path):
    gguf_files = pytest.importorskip("tests.weights.gguf_files")
    path = gguf_files.tiny(tmp_path, "llama", "Q8_0")
    with pytest.raises(
        ValueError, match="lm_head_quantization='fp8': the LM head of .* is quantised already .GGUF Q8_0"
    ):
        LLM(str(path), lm_head_quantization="fp8", **OPTIONS)
    with pytest.raises(ValueError, match="lm_head_quantization='int4': must be fp8 or int8"):
        EngineConfig(str(path), lm_head_quantization="int4")


def test_a_gguf_file_of_floats_is_quantised(tmp_path):
    gguf_files = pytest.importorskip("tests.weights.gguf_files")
    path = gguf_files.tiny(tmp_path, "llama", "F16")
    packed = LLM(str(path), quantization="int8", **OPTIONS, **PACKED)
    assert len(packed_names(packed.engine.runner.model)) == 8
    served = LLM(str(path), quantization="int8", **OPTIONS)
    model = served.engine.runner.model
    if isinstance(model, PackedDecoderForCausalLM):
        assert model.weights.layers[0].up.format == "Q8_0"
    got = [llm.generate([[1, 5, 9, 3]], GREEDY, use_tqdm=False)[0]["token_ids"] for llm in (packed, served)]
    assert got[0] == got[1]


def test_large_matrices_are_quantised_a_part_at_a_time():
    weight = drawn(400, 256)
    whole = to_fp8(weight), to_fp8_blocks(weight), to_int(weight, 4, 64)
    split = (
        to_fp8(weight, at_once=2**15),
        to_fp8_blocks(weight, at_once=2**15),
        to_int(weight, 4, 64, at_once=128 * 256),
    )
    for one, parts in zip(whole, split):
        assert all(torch.equal(a, b) for a, b in zip(one.planes.values(), parts.planes.values()))
