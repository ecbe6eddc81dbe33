"""Qwen3-MoE: its config.json and its checkpoints. `test_architectures.py` compares its tokens in every mode."""

import logging

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.model_config import ModelConfig
from nanovllm.model_experts import MoeConfig
from nanovllm.models.model_presets import preset
from nanovllm.models.registry import model_class
from tests import tiny
from tests.engine import small_engine
from tests.native import NATIVE
from tests.weights.checkpoints import configure, edit, load, refused

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


@pytest.mark.parametrize("which", ["experts.3.gate_proj", "experts.0.up_proj", "experts.2.down_proj", "gate"])
def test_a_tensor_that_is_missing_misshapen_or_damaged(checkpoint, which):
    name = f"model.layers.1.mlp.{which}.weight"
    edit(checkpoint, lambda t: t.update({name: t[name][:, 1:].clone()}))
    refused(checkpoint, f"tensor {name!r} has shape", "expected [")
    edit(checkpoint, lambda t: t.update({name: torch.full((t[name].shape[0], t[name].shape[1] + 1), torch.nan)}))
    refused(checkpoint, repr(name), "NaN")
    edit(checkpoint, lambda t: t.pop(name))
    refused(checkpoint, f"lacks {name}")


@pytest.mark.parametrize(
    "name",
    [
        "experts.4.up_proj.weight", "experts.00.up_proj.weight", "experts.0.up_proj.bias", "experts.0.weight",
        "experts.gate_up_proj.weight", "experts.0.w1.weight", "gate_proj.weight", "shared_expert.up_proj.weight",
    ],
)  # fmt: skip
def test_a_tensor_of_another_model(checkpoint, name):
    name = f"model.layers.0.mlp.{name}"
    edit(checkpoint, lambda t: t.update({name: torch.zeros(24, 48)}))
    refused(checkpoint, "unexpected tensor", repr(name))


def test_fewer_experts_than_the_file_has(checkpoint):
    configure(checkpoint, num_local_experts=3)
    refused(checkpoint, "experts.3.")


# ------------------------------------------------------------------------------------------------ tokens


def test_logits_equal_transformers(tmp_path):
    reference = tiny.save(
        tmp_path, "qwen3_moe", seed=5, num_hidden_layers=3, mlp_only_layers=[1], num_experts=7, num_experts_per_tok=4,
        moe_intermediate_size=36, norm_topk_prob=True,
    )  # fmt: skip
    llm = small_engine.make(tmp_path, device="cpu")
    prompt = small_engine.random_prompts([60])[0]
    prompt = [token % 199 for token in prompt]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
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
