"""Models whose attention makes masks of its own, or sees later tokens: what a plan of ours must not reach."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanovllm.adapters.transformers import register_attention
from nanovllm.adapters.transformers.own_masks import changes_its_mask
from tests.adapters.models import prompts, put_in

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def spread(model):
    """Weights with which logits are far apart."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval().requires_grad_(False)


def logits(model, given, **more):
    with torch.no_grad():
        return model(**given, **more).logits


@pytest.fixture
def doge():
    """It masks what its own scores of keys say, besides what the mask says."""
    return spread(transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES)))


@pytest.mark.parametrize("padding", [None, "left"])
def test_attention_that_computes_with_its_mask_is_left(doge, padding):
    given = prompts(padding)
    real = given["attention_mask"].bool()
    expected = logits(doge, given)
    with put_in(doge) as report:
        torch.testing.assert_close(logits(doge, given)[real], expected[real], rtol=0, atol=5e-5)
    left = {row.op: row.why for row in report.left if row.module == "DogeAttention"}
    assert left["attention_dense"] == "attention of its model computes with masks"
    assert left["rotary_embedding"] == "it computes with the mask"


def test_a_model_that_computes_with_its_mask_may_name_the_attention(doge):
    register_attention()
    given = prompts("left")
    real = given["attention_mask"].bool()
    expected = logits(doge, given)
    doge.set_attn_implementation("nanovllm")
    torch.testing.assert_close(logits(doge, given)[real], expected[real], rtol=0, atol=5e-5)


def test_an_encoder_with_a_soft_cap_sees_later_tokens():
    """Without padding it gets no mask at all."""
    part = SIZES | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": 64}
    config = transformers.T5GemmaConfig(encoder=part, decoder=part | {"is_decoder": True}, vocab_size=99)
    config._attn_implementation = "eager"
    model = spread(transformers.T5GemmaForConditionalGeneration(config))
    given, start = prompts(), {"decoder_input_ids": prompts()["input_ids"][:, :4]}
    expected = logits(model, given, **start)
    with put_in(model) as report:
        torch.testing.assert_close(logits(model, given, **start), expected, rtol=0, atol=5e-5)
    assert any(row.op == "attention_dense" for row in report.replaced)


@pytest.mark.parametrize("name, extra", [("Phimoe", {"num_local_experts": 2}), ("Olmoe", {"num_experts": 2})])
def test_the_window_is_that_of_the_mask(name, extra):
    """PhiMoE's attention does not hand its window on. OLMoE's names one, but its masks have none."""
    config = getattr(transformers, f"{name}Config")(**SIZES | {"head_dim": 8, "num_experts_per_tok": 1} | extra)
    config.sliding_window = 3
    model = spread(getattr(transformers, f"{name}ForCausalLM")(config))
    given = prompts("left")
    real = given["attention_mask"].bool()

    def run():
        return logits(model, given)[real], model.generate(**given, max_new_tokens=6, do_sample=False)

    expected, tokens = run()
    with put_in(model) as report:
        got, tokens_with_ops = run()
    assert any(row.op == "attention_dense" for row in report.replaced)
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)
    assert torch.equal(tokens_with_ops, tokens)


def test_masks_that_are_handed_on_are_no_own_masks():
    from transformers.models.esm.modeling_esm import EsmSelfAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
    from transformers.models.t5.modeling_t5 import T5Attention

    for kind in (EsmSelfAttention, GPT2Attention, LlamaAttention, LlamaMLP, T5Attention, torch.nn.Linear):
        assert not changes_its_mask(kind), kind
