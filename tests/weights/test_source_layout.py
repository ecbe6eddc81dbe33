"""From a checkpoint's tensors to a model's: fused ones are split, heads reordered, norms completed."""

import pytest
import torch

from nanovllm.layers.linear import Part
from nanovllm.layers.rotary_embedding import head_order
from nanovllm.model_config import ModelConfig
from nanovllm.weights.safetensors_files import TensorHeader, WeightError
from nanovllm.weights.source_layout import SourceLayout

SIZES = dict(vocab_size=20, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4)  # fmt: skip
PREFIX = "model.layers.0."
QKV, GATE_UP = PREFIX + "self_attn.qkv_proj.weight", PREFIX + "mlp.gate_up_proj.weight"
Q, K, V = (PREFIX + f"self_attn.{x}_proj.weight" for x in "qkv")


def layout(architecture="Phi3", format="safetensors", **entries):
    config = ModelConfig.from_dict(SIZES | dict(architectures=[f"{architecture}ForCausalLM"]) | entries)
    return SourceLayout(config, format)


def header(name, *shape):
    return TensorHeader(name, shape, "F32", True)


def test_headers_of_fused_tensors():
    made = layout().headers([header(QKV, 32, 8), header(GATE_UP, 12, 8), header("model.norm.weight", 8)])
    assert [(h.name, h.shape) for h in made[:3]] == [(Q, (16, 8)), (K, (8, 8)), (V, (8, 8))]
    assert [h.name.split(".")[-2] for h in made[3:]] == ["gate_proj", "up_proj", "norm"]
    assert [h.shape for h in made[3:]] == [(6, 8), (6, 8), (8,)]
    assert layout("Qwen2").headers([header(QKV, 32, 8)]) == [header(QKV, 32, 8)]  # an unexpected tensor there


def test_a_fused_tensor_of_other_rows_is_an_error():
    with pytest.raises(
        WeightError, match="has shape .31, 8., expected 32 rows: 16 of q_proj, 8 of k_proj, 8 of v_proj"
    ):
        layout().headers([header(QKV, 31, 8)])


@pytest.mark.parametrize("entries, order", [({}, [0, 1, 2, 3]), ({"partial_rotary_factor": 0.5}, [0, 2, 1, 3])])
def test_pieces_and_their_parts(entries, order):
    weight = torch.arange(32.0)[:, None].expand(32, 8)
    assert entries == {} or order == head_order(4, 2)
    reordered = torch.tensor([4 * head + i for head in range(4) for i in order])
    one = layout(**entries)
    found = dict(one.tensors([(QKV, weight)]))
    assert torch.equal(found[Q], weight[:16][reordered]) and torch.equal(found[V], weight[24:])
    assert torch.equal(found[K], weight[16:24][reordered[:8]])
    parts = {Q: Part(0, 4, 8), V: Part(0, 4, 4), "model.norm.weight": Part(0, 1, 2)}
    assert list(one.stored_parts(parts)) == ["model.norm.weight"]  # the others are in a tensor that is read whole
    found = dict(one.tensors([(QKV, weight), ("model.norm.weight", torch.ones(2))], parts))
    assert torch.equal(found[Q], weight[4:12][reordered[:8]]) and torch.equal(found[V], weight[28:])
    assert len(found["model.norm.weight"]) == 2  # it comes as the part that it is
    # A checkpoint whose tensors are not fused.
    assert torch.equal(dict(one.tensors([(Q, weight[:16])], parts))[Q], weight[4:12][reordered[:8]])


def test_norms_that_store_w_for_one_plus_w():
    w = torch.tensor([0.5, -1.0, 3.0], dtype=torch.bfloat16)
    for name in ("model.norm.weight", PREFIX + "self_attn.q_norm.weight", PREFIX + "pre_feedforward_layernorm.weight"):
        ((_, made),) = layout("Gemma3").tensors([(name, w)])
        assert made.dtype == torch.float32 and made.tolist() == [1.5, 0.0, 4.0]
        for other in (layout("Gemma3", "gguf"), layout("Qwen2")):
            ((_, same),) = other.tensors([(name, w)])
            assert same is w or torch.equal(same, w)
    ((_, matrix),) = layout("Gemma3").tensors([("model.embed_tokens.weight", w)])
    assert torch.equal(matrix, w)
