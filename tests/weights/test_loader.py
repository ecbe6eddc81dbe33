"""Where a model is, and its weights: every tensor exactly once and in its place, or an error that names it."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group, split_over
from nanovllm.weights import safetensors_files
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.loader import load_model
from nanovllm.weights.safetensors_files import WeightError
from tests import tiny
from tests.native import NATIVE
from tests.weights.checkpoints import CPU, configure, edit, fused, load, refused


@pytest.mark.parametrize(
    "architecture, tied, biases, shard_size",
    [("qwen3", False, True, "1GB"), ("qwen3", True, False, "40KB"), ("llama", False, False, "40KB"),
     ("llama", True, True, "1GB")],
)  # fmt: skip
def test_every_parameter_is_in_its_place(tmp_path, architecture, tied, biases, shard_size):
    overrides = dict(tie_word_embeddings=tied, attention_bias=biases)
    if architecture == "llama":
        overrides["mlp_bias"] = biases
    reference = tiny.save(tmp_path, architecture, max_shard_size=shard_size, **overrides)
    assert len(list(tmp_path.glob("*.safetensors"))) > (1 if shard_size != "1GB" else 0)
    model = load(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fused(reference, name)), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_weights_take_the_dtype_asked_for(checkpoint):
    reference = load(checkpoint)
    for dtype in (torch.bfloat16, torch.float16):
        model = load(checkpoint, dtype)
        for ours, exact in zip(model.parameters(), reference.parameters()):
            assert ours.dtype == dtype and torch.equal(ours, exact.to(dtype))
        assert {name: b.dtype for name, b in model.named_buffers() if name.endswith("cos_sin_cache")} == dict.fromkeys(
            (name for name, _ in model.named_buffers()), torch.float32
        )
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("architecture, vocab_size", [("llama", 199), ("qwen3", 9001)])
def test_a_head_that_is_stored_and_not_the_embedding_is_not_tied(tmp_path, architecture, vocab_size):
    """transformers does not tie them then; to pass the tensor over would be another model."""
    tiny.save(tmp_path, architecture, num_hidden_layers=1, tie_word_embeddings=True, vocab_size=vocab_size)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tmp_path, torch.bfloat16)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(3, 3)}))
    refused(tmp_path, "'lm_head.weight'", "shape [3, 3]")
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    refused(tmp_path, "'lm_head.weight'", "'model.embed_tokens.weight'", "tie_word_embeddings=true; set it to false")
    configure(tmp_path, tie_word_embeddings=False)
    assert not torch.equal(load(tmp_path).lm_head.weight, load(tmp_path).model.embed_tokens.weight)


def test_old_inverse_frequencies_are_passed_over(checkpoint):
    edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(checkpoint)


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    "names, more",
    [
        (["model.embed_tokens.weight"], ""), (["lm_head.weight"], ""), ([LAYER + "self_attn.k_proj.weight"], ""),
        ([LAYER + "self_attn.q_norm.weight"], ""), ([LAYER + "mlp.down_proj.weight"], ""),
        ([LAYER + f"{part}.weight" for part in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
                                                "self_attn.k_norm")], " and 2 more"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing(checkpoint, names, more):
    edit(checkpoint, lambda t: [t.pop(name) for name in names])
    refused(checkpoint, "lacks " + ", ".join(names[:3]) + more)


def test_a_bias_that_is_promised_and_not_there(checkpoint):
    configure(checkpoint, attention_bias=True)
    refused(checkpoint, "lacks", "self_attn.k_proj.bias")


def test_tensors_that_the_model_does_not_have(checkpoint):
    """Of other layers and models, our own names of fused tensors, and attributes that are no parameters."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name in (
        "model.layers.1.mlp.up_proj.weight", LAYER + "mlp.experts.0.up_proj.weight", LAYER + "self_attn.q_proj.bias",
        LAYER + "mlp.up_proj.weight_scale_inv", "model.embed_tokens.bias", "weight", "score", "model.norm",
        LAYER + "weight", LAYER + "self_attn.qkv_proj.weight", "model.norm.eps", "model.norm.forward",
    ):  # fmt: skip
        save_file(tensors | {name: torch.zeros(3)}, checkpoint / "model.safetensors")
        refused(checkpoint, "unexpected tensor", repr(name))


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("model.embed_tokens.weight", lambda t: t[:-1], "shape [198, 48], expected [199, 48]"),
        ("model.norm.weight", lambda t: t[None], "shape [1, 48], expected [48]"),
        (LAYER + "self_attn.q_proj.weight", lambda t: t.T, "shape [48, 64], expected [64, 48]"),
        (LAYER + "mlp.gate_proj.weight", lambda t: t.flatten(), "shape [3840], expected [80, 48]"),
        (LAYER + "mlp.down_proj.weight", lambda t: t.to(torch.int8), "dtype int8, expected a floating-point one"),
        (LAYER + "mlp.up_proj.weight", lambda t: t.to(torch.uint8), "quantised checkpoint needs a quantization_config"),
        ("lm_head.weight", lambda t: t.to(torch.complex64), "dtype complex64"),
        ("model.norm.weight", lambda t: t.to(torch.bool), "dtype bool"),
    ],
)
def test_a_tensor_of_the_wrong_shape_or_dtype(checkpoint, name, change, said):
    edit(checkpoint, lambda t: t.update({name: change(t[name]).contiguous()}))
    refused(checkpoint, repr(name), said)


def test_a_tensor_that_is_not_finite(tmp_path):
    """Every one of them, wherever in it the value is, and whatever it is fused with."""
    tiny.save(tmp_path, "qwen3", num_hidden_layers=1, attention_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, name in enumerate(tensors):
        spoilt = tensors[name].flatten().clone()
        spoilt[(0, len(spoilt) // 2, -1)[i % 3]] = (math.nan, math.inf, -math.inf)[i // 3 % 3]
        save_file(tensors | {name: spoilt.view(tensors[name].shape)}, tmp_path / "model.safetensors")
        said = f"tensor '{name}' holds NaN or infinity in 1 of {spoilt.numel()} values, as float32; "
        refused(tmp_path, said, "the checkpoint is damaged: download it again")


def test_many_values_that_are_not_finite_are_counted(checkpoint):
    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3:5] = math.nan
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = -math.inf
        tensors["model.norm.weight"].fill_(math.inf)
        tensors["lm_head.weight"].fill_(torch.finfo(torch.float32).max)  # that is finite, however large

    edit(checkpoint, spoil)
    refused(checkpoint, "'model.layers.0.mlp.up_proj.weight' holds", "in 97 of 3840 values", "(such tensors in all: 2)")


def test_values_beyond_float16_say_which_dtype_holds_them(checkpoint):
    edit(checkpoint, lambda t: t["model.norm.weight"][7].fill_(70000))
    with pytest.raises(
        WeightError, match="'model.norm.weight' .* 1 of 48 values, as float16; .* 65504 .* dtype=.bfloat16."
    ):
        load(checkpoint, torch.float16)
    load(checkpoint, torch.bfloat16)


def test_a_tied_embedding_that_is_not_finite_is_not_called_different(tmp_path):
    """NaN differs from itself."""
    tiny.save(tmp_path, "llama", num_hidden_layers=1, tie_word_embeddings=True)
    edit(tmp_path, lambda t: t["model.embed_tokens.weight"][5, 5].fill_(math.nan))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    refused(tmp_path, "'model.embed_tokens.weight' holds NaN or infinity in 1 of")


def test_a_rank_without_rows_of_a_small_vocabulary(tmp_path):
    reference = tiny.save(tmp_path, "llama", num_hidden_layers=1, num_key_value_heads=4, vocab_size=3)
    checkpoint = locate(EngineConfig(str(tmp_path)))
    with split_over(Group(3, 4)):
        model = load_model(checkpoint, NATIVE, torch.float32, CPU, 16)
    assert model.model.embed_tokens.weight.eq(0).all() and reference.lm_head.weight.shape[0] == 3


def test_a_rank_reads_its_part_of_the_files_alone(tmp_path, monkeypatch):
    reference = tiny.save(tmp_path, "llama", num_key_value_heads=2, vocab_size=199)
    iter_tensors, read = safetensors_files.iter_tensors, []

    def counted(*arguments):
        for name, tensor in iter_tensors(*arguments):
            read[-1][name] = tensor.numel()
            yield name, tensor

    monkeypatch.setattr(safetensors_files, "iter_tensors", counted)
    checkpoint = locate(EngineConfig(str(tmp_path)))
    for rank in range(2):
        read.append({})
        with split_over(Group(rank, 2)):
            load_model(checkpoint, NATIVE, torch.float32, CPU, 16)
    for name, whole in reference.state_dict().items():
        each = [numbers[name] for numbers in read]
        assert each == [whole.numel()] * 2 if whole.dim() == 1 else sum(each) == whole.numel() and min(each) > 0, name


def test_a_tensor_that_occurs_twice(checkpoint):
    save_file({"model.norm.weight": torch.zeros(48)}, checkpoint / "more.safetensors")
    refused(checkpoint, "'model.norm.weight' occurs twice")


def test_more_layers_than_the_files_hold_are_refused_before_they_are_built(tmp_path, monkeypatch):
    tiny.save(tmp_path)
    configure(tmp_path, num_hidden_layers=10**4, layer_types=None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    refused(tmp_path, str(tmp_path), "num_hidden_layers=10000", "the files hold 2 layers")


def test_shapes_are_compared_before_memory_is_taken(tmp_path):
    """A vocabulary of 2^31 - 1 rows of 48: 200 GB in bfloat16 each for embedding and head."""
    tiny.save(tmp_path, num_hidden_layers=1)
    configure(tmp_path, vocab_size=2**31 - 1)
    refused(tmp_path, "has shape [199, 48], expected [2147483647, 48]")


def test_random_weights_need_only_a_config(tmp_path):
    tiny.save(tmp_path, "llama", attention_bias=True)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy")
    # Kernels read parameters early, and nothing else (`are_constant`).
    held = [getattr(m, name, None) for m in model.modules() for name in ("weight", "bias")]
    assert {type(weight) for weight in held} == {torch.nn.Parameter, type(None)}
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert abs(parameter.std().item() - 0.02) < 0.002 and abs(parameter.mean().item()) < 0.002, name
    again = load(tmp_path, load_format="dummy")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
