"""Qwen3-MoE: its config.json and its checkpoints. `test_architectures.py` compares its tokens in every mode."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group, split_over
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.model_config import ModelConfig, MoeConfig
from nanovllm.models.model_presets import preset
from nanovllm.models.model_registry import model_class
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.loader import load_model
from nanovllm.weights.weight_forms import WeightForms
from tests import tiny
from tests.engine import small_engine
from tests.native import NATIVE
from tests.weights.checkpoints import CPU, configure, edit, load, refused

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
BASE = dict(architectures=["Qwen3MoeForCausalLM"], vocab_size=100, hidden_size=64, intermediate_size=128,
            num_hidden_layers=4, num_attention_heads=4)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    tiny.save(tmp_path, "qwen3_moe", **EXPERTS)
    return tmp_path


# ------------------------------------------------------------------------------------------------ config.json


def test_missing_entries_are_those_of_transformers():
    from transformers import Qwen3MoeConfig

    ours, theirs = ModelConfig.from_dict(BASE), Qwen3MoeConfig()
    assert ours.moe == MoeConfig(
        theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, theirs.norm_topk_prob
    )
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, 16)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ModelConfig.from_dict(preset("qwen3-0.6b")).moe is None


def test_which_layers_have_experts():
    def sparse(**entries):
        return tuple(layer.sparse for layer in ModelConfig.from_dict(BASE | entries).layers)

    assert sparse(decoder_sparse_step=2) == (False, True, False, True)
    assert sparse(mlp_only_layers=[0, 3]) == (False, True, True, False)
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == (False, False, False, True)
    assert sparse(num_local_experts=9, mlp_only_layers=None) == (True,) * 4


@pytest.mark.parametrize(
    "entries, said",
    [
        (dict(num_experts=4, num_experts_per_tok=5), "num_experts_per_tok=5: must be at most num_experts=4"),
        (dict(num_local_experts=0), "num_local_experts=0: must be a positive integer"),
        (dict(moe_intermediate_size="768"), "moe_intermediate_size='768': must be a positive integer"),
        (dict(mlp_only_layers=[4]), r"mlp_only_layers=\[4\]: must be a list of layers, from 0 to 3"),
        (dict(mlp_only_layers=7), "mlp_only_layers=7: must be a list of layers"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported for experts; only 'silu' is"),
        (dict(norm_topk_prob=1), "norm_topk_prob=1: must be true or false"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step=0: must be a positive integer"),
    ],
)
def test_an_entry_that_is_wrong(entries, said):
    with pytest.raises(ValueError, match=f"config.json: {said}"):
        ModelConfig.from_dict(BASE | entries)


def test_weights_that_a_token_is_multiplied_with():
    config = ModelConfig.from_dict(preset("qwen3-30b-a3b"))
    with torch.device("meta"):
        model = model_class(config.architecture)(config, 8, NATIVE)
    weights, layer_bytes = model.layer_sizes
    assert 2.6e9 < weights < 2.8e9  # of the 3.3 billion that are active; the others are the embedding and the head
    assert layer_bytes == sum(p.nbytes for p in model.model.layers[0].parameters())


# ------------------------------------------------------------------------------------------------ checkpoints


def test_every_expert_is_in_its_place(tmp_path):
    reference = tiny.save(tmp_path, "qwen3_moe", mlp_only_layers=[0], **EXPERTS).state_dict()
    model = dict(load(tmp_path).named_parameters())
    for name in ("gate_up_proj", "down_proj"):
        place = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(model[f"{place}.weight"], reference[place])
    gate = "model.layers.1.mlp.gate.weight"
    assert torch.equal(model[gate], reference[gate]) and "model.layers.0.mlp.gate_up_proj.weight" in model


@pytest.mark.parametrize("which", ["experts.3.gate_proj", "experts.2.down_proj", "gate"])
def test_a_tensor_that_is_missing_misshapen_or_damaged(checkpoint, which):
    name = f"model.layers.1.mlp.{which}.weight"
    edit(checkpoint, lambda t: t.update({name: t[name][:, 1:].clone()}))
    refused(checkpoint, f"tensor {name!r} has shape", "expected [")
    edit(checkpoint, lambda t: t.update({name: torch.full((t[name].shape[0], t[name].shape[1] + 1), torch.nan)}))
    refused(checkpoint, repr(name), "NaN")
    edit(checkpoint, lambda t: t.pop(name))
    refused(checkpoint, f"lacks {name}")


def test_tensors_of_another_model(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    for name in (
        "experts.4.up_proj.weight", "experts.00.up_proj.weight", "experts.0.up_proj.bias", "experts.0.weight",
        "experts.gate_up_proj.weight", "experts.0.w1.weight", "gate_proj.weight", "shared_expert.up_proj.weight",
    ):  # fmt: skip
        name = f"model.layers.0.mlp.{name}"
        save_file(tensors | {name: torch.zeros(24, 48)}, checkpoint / "model.safetensors")
        refused(checkpoint, "unexpected tensor", repr(name))
    save_file(tensors, checkpoint / "model.safetensors")
    configure(checkpoint, num_local_experts=3)
    refused(checkpoint, "experts.3.")


# ------------------------------------------------------------------------------------------------ tokens


def test_logits_equal_transformers(tmp_path):
    reference = tiny.save(
        tmp_path, "qwen3_moe", seed=5, num_hidden_layers=3, mlp_only_layers=[1], num_experts=7, num_experts_per_tok=4,
        moe_intermediate_size=36, norm_topk_prob=True,
    )  # fmt: skip
    llm = small_engine.make(tmp_path, device="cpu")
    prompt = [token % 199 for token in small_engine.random_prompts([60])[0]]
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    expected = tiny.logprobs(reference, prompt)
    for position, token in enumerate(prompt[1:]):
        ours = output.prompt_logprobs[position + 1][token].logprob
        assert ours == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_layers_run_op_by_op_on_a_cpu(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        llm = LLM(checkpoint, device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4, max_model_len=32)
    assert type(llm.engine.runner.model).__name__ == "Qwen3MoeForCausalLM"
    if llm.kernels.providers["decoder_step"] != "native":
        assert "Qwen3MoeForCausalLM: the op decoder_step has no experts" in caplog.text


# ------------------------------------------------------------------------------------------------ 8-bit floats

FP8 = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, hidden_size=96, norm_topk_prob=True)


def quantised(directory, keep_packed, dtype=torch.float32, **arguments):
    checkpoint = locate(EngineConfig(str(directory), quantization="fp8", **arguments))
    with torch.inference_mode():
        return load_model(checkpoint, NATIVE, dtype, CPU, max_position=16, keep_packed=keep_packed)


def test_experts_that_are_quantised_while_loading_stay_in_8_bit_floats(tmp_path):
    reference = tiny.save(tmp_path, "qwen3_moe", **FP8).state_dict()
    packed, expanded = (dict(quantised(tmp_path, keep).named_modules()) for keep in (True, False))
    for which in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{which}"
        ours, floats, exact = packed[name], expanded[name].weight, reference[name]
        assert ours.weight.dtype == torch.float8_e4m3fn and ours.weight.shape == exact.shape == floats.shape
        assert torch.equal(ours.floats(torch.float32), floats)
        assert 0 < (floats - exact).norm() / exact.norm() < 0.04


class Apart(Group):
    """A rank that gets nothing from the other one."""

    def largest(self, x):
        return x  # of the experts no scale needs the other rank


def test_experts_of_a_rank_are_those_of_the_whole(tmp_path):
    tiny.save(tmp_path, "qwen3_moe", **FP8)
    name = "model.layers.0.mlp.experts"
    whole = quantised(tmp_path, True).get_submodule(name)
    gate, up = whole.gate_up_proj.floats(torch.float32).chunk(2, 1)
    down = whole.down_proj.floats(torch.float32)
    for rank in range(2):
        with split_over(Apart(rank, 2)):
            part = quantised(tmp_path, True).get_submodule(name)
        halves = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        assert torch.equal(part.gate_up_proj.floats(torch.float32), halves)
        assert torch.equal(part.down_proj.floats(torch.float32), down.chunk(2, 2)[rank])


def test_sizes_that_are_no_blocks_are_expanded(checkpoint):
    model = quantised(checkpoint, True)
    assert model.get_submodule("model.layers.0.mlp.experts.down_proj").weight.dtype == torch.float32


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_tokens_with_experts_in_8_bit_floats_are_those_of_the_same_numbers(tmp_path, load_format):
    tiny.save(tmp_path, "qwen3_moe", **FP8)
    prompts = [[token % 199 for token in prompt] for prompt in small_engine.random_prompts([1, 17, 40])]
    told = []
    for packed in (True, False):
        llm = small_engine.make(
            tmp_path, device="cpu", quantization="fp8", load_format=load_format, use_custom_kernels=False,
            fast_policy=FastPolicy(weight_forms=WeightForms(packed=packed)),
        )  # fmt: skip
        experts = llm.engine.runner.model.get_submodule("model.layers.0.mlp.experts.down_proj")
        assert (experts.scale is not None) == packed
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        told.append(small_engine.generate(llm, prompts, params))
    assert told[0] == told[1]
