"""Quantised checkpoints: our weights are the numbers that the files stand for, and tokens follow from them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.models.packed_decoder import PackedDecoderForCausalLM
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.loader import load_model
from nanovllm.weights.safetensors_files import WeightError
from nanovllm.weights.weight_forms import WeightForms
from tests import tiny
from tests.native import NATIVE
from tests.weights.checkpoints import CPU, edit, fused
from tests.weights.quantised_files import FORMATS, write

MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = dict(
    device="cpu", dtype="float32", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=60,
    max_model_len=64,
)  # fmt: skip
STAY_PACKED = FastPolicy(weight_forms=WeightForms(packed=True))
PACKED = dict(use_custom_kernels=False, fast_policy=STAY_PACKED)
MODES = {
    "C++": dict(),
    "op by op": dict(use_custom_kernels=False),
    "packed": PACKED,
    "padded": PACKED | dict(fast_policy=replace(STAY_PACKED, padding=True, prefill_graphs=True)),
    "chunked": PACKED | dict(max_num_batched_tokens=11),
}


def loaded(directory, dtype=torch.float32, keep_packed=True):
    with torch.inference_mode():
        checkpoint = locate(EngineConfig(str(directory)))
        return load_model(checkpoint, NATIVE, dtype, CPU, max_position=16, keep_packed=keep_packed)


def weights(model):
    """Every parameter, dequantised, by the name that it has in a model of floats."""
    found = dict(model.named_parameters())
    found |= {name: m.dequantised() for name, m in model.named_modules() if isinstance(m, PackedWeight)}
    return found


def packed_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def prompts(vocab=199, lengths=(1, 7, 30, 16)):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def tokens(directory, **options):
    llm = LLM(str(directory), **{**OPTIONS, **options})
    return [c.token_ids for o in llm.generate(prompts(), GREEDY, use_tqdm=False) for c in o.outputs]


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_numbers_that_the_files_stand_for(tmp_path, name):
    reference = write(tmp_path, FORMATS[name], attention_bias=True)
    model = loaded(tmp_path)
    found = weights(model)
    for parameter in found:
        assert torch.equal(found[parameter], fused(reference, parameter)), parameter
    assert {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= packed_names(
        model
    ) or name == "fp8-block-f32"
    expanded = loaded(tmp_path, keep_packed=False)
    assert not packed_names(expanded)
    assert all(torch.equal(weight, found[name]) for name, weight in expanded.named_parameters())


# Of formats that become the same kind of matrix one: what each becomes is compared above.
SERVED = (
    "fp8-block", "fp8-tensor", "fp8-channel", "awq", "gptq-8", "gptq-act-order", "gptq-whole-columns",
    "w8a8-asymmetric", "mixed",
)  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    reference = write(tmp_path, FORMATS[name], "llama" if name in ("awq", "mixed") else "qwen3")
    want = tiny.greedy_each(reference, prompts(), GREEDY.max_tokens)
    modes = MODES if name in ("fp8-block", "gptq-act-order", "mixed") else {"C++": {}, "packed": PACKED}
    for mode, options in modes.items():
        assert tokens(tmp_path, **options) == want, mode


@pytest.mark.parametrize(
    "name, architecture, overrides",
    [
        *((name, "phi3", dict(partial_rotary_factor=0.5)) for name in ("fp8-block", "fp8-tensor", "awq")),
        *((name, "phi3", dict(num_key_value_heads=1)) for name in ("gptq-act-order", "w4a16-asymmetric", "w8a8")),
        ("gptq-asymmetric", "qwen2", dict()),
        ("awq", "gemma3", dict(tie_word_embeddings=True)),
        ("fp8-channel", "smollm3", dict()),
        ("fp8-block", "qwen3_moe", MOE),
        ("awq", "qwen3_moe", MOE),
    ],
)  # fmt: skip
def test_architectures(tmp_path, name, architecture, overrides):
    """Some store several shards in one tensor, and some rotate heads in part, for which rows are reordered."""
    reference = write(tmp_path, FORMATS[name], architecture, **overrides)
    want = tiny.greedy_each(reference, prompts(), GREEDY.max_tokens)
    assert tokens(tmp_path, **PACKED) == want
    assert tokens(tmp_path) == want
    # Of a mixture of experts the router is packed. The experts are expanded, or stay in 8-bit floats.
    model = loaded(tmp_path)
    assert len(packed_names(model)) == (6 if architecture == "qwen3_moe" else 8)
    stacked = {
        parameter.dtype for name, parameter in model.named_parameters() if name.endswith("experts.down_proj.weight")
    }
    assert stacked == (
        set() if architecture != "qwen3_moe" else {torch.float8_e4m3fn if "fp8" in name else torch.float32}
    )


def test_a_plane_of_several_shards_that_is_missing(tmp_path):
    write(tmp_path, FORMATS["awq"], "phi3", num_hidden_layers=1)
    edit(tmp_path, lambda t: t.pop("model.layers.0.self_attn.qkv_proj.scales"))
    with pytest.raises(WeightError, match="lacks model.layers.0.self_attn.qkv_proj.scales$"):
        loaded(tmp_path)


# A format that holds all numbers of the checkpoint; F32: they are expanded.
CPU_FORMATS = {
    "fp8-block": "E4M3", "fp8-tensor": "E4M3", "fp8-channel": "E4M3", "awq": "INT4_32", "gptq": "Q4_0",
    "gptq-asymmetric": "INT4_32", "gptq-act-order": "F32", "gptq-8": "Q8_0",
}  # fmt: skip


@pytest.mark.parametrize("name", CPU_FORMATS)
def test_the_cpp_kernels_keep_weights_packed(tmp_path, name):
    write(tmp_path, FORMATS[name])
    model = LLM(str(tmp_path), **OPTIONS).engine.runner.model
    if not isinstance(model, PackedDecoderForCausalLM):
        pytest.skip("the C++ kernels cannot run here")
    assert model.weights.layers[0].down.format == CPU_FORMATS[name]
    assert model.embedding.format == "F32"
