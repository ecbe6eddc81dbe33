"""Where a model is, and its weights: every tensor exactly once and in its place, or an error that names it."""

import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.config import EngineConfig
from nanovllm.layers.parallel import TensorParallel
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import PRESETS
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.loader import load_model, parameter_bytes
from nanovllm.weights.safetensors_files import WeightError, iter_tensors
from tests import tiny
from tests.native import NATIVE

CPU = torch.device("cpu")


def load(model, dtype=torch.float32, **arguments):
    checkpoint = locate(EngineConfig(str(model), **arguments))
    with torch.inference_mode():
        return load_model(checkpoint, NATIVE, dtype, CPU, max_position=16)


@pytest.fixture(autouse=True)
def pickles_stay_closed(monkeypatch):
    """Nothing here may ever reach torch.load or pickle."""

    def opened(*_, **__):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    monkeypatch.setattr(pickle, "load", opened)


@pytest.fixture
def checkpoint(tmp_path):
    """An untied Qwen3 with one file of weights, which `edit` rewrites."""
    tiny.save(tmp_path, "qwen3", num_hidden_layers=1)
    return tmp_path


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def fused(reference, name):
    """The tensor that our parameter `name` must hold, of a transformers model."""
    weights = reference.state_dict()
    for ours, theirs in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if ours in name:
            return torch.cat([weights[name.replace(ours, part)] for part in theirs])
    return weights[name]


# ------------------------------------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_every_parameter_is_in_its_place(tmp_path, architecture, tied, biases, shard_size):
    overrides = dict(tie_word_embeddings=tied, attention_bias=biases)
    if architecture == "llama":
        overrides["mlp_bias"] = biases
    reference = tiny.save(tmp_path, architecture, max_shard_size=shard_size, **overrides)
    assert len(list(tmp_path.glob("*.safetensors"))) > (1 if shard_size != "1GB" else 0)
    model = load(tmp_path)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert torch.equal(parameter, fused(reference, name)), name
    assert parameter_bytes(model) == sum(p.nbytes for p in {p.data_ptr(): p for p in reference.parameters()}.values())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_weights_take_the_dtype_asked_for(checkpoint):
    reference = load(checkpoint)
    for dtype in (torch.bfloat16, torch.float16):
        model = load(checkpoint, dtype)
        for ours, exact in zip(model.parameters(), reference.parameters()):
            assert ours.dtype == dtype and torch.equal(ours, exact.to(dtype))
        assert model.model.layers[0].self_attn._rotary.cos_sin_cache.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_tied_head_that_is_stored_too_is_not_an_extra(tmp_path):
    tiny.save(tmp_path, "llama", num_hidden_layers=1, tie_word_embeddings=True)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tmp_path)


@pytest.mark.parametrize("architecture, vocab_size", [("llama", 199), ("qwen3", 9001)])
def test_a_head_that_is_stored_and_not_the_embedding_is_not_tied(tmp_path, architecture, vocab_size):
    """transformers does not tie them then; to pass the tensor over would be another model."""
    tiny.save(tmp_path, architecture, num_hidden_layers=1, tie_word_embeddings=True, vocab_size=vocab_size)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tmp_path, torch.bfloat16)
    edit(tmp_path, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    refused(tmp_path, "'lm_head.weight'", "'model.embed_tokens.weight'", "tie_word_embeddings=true; set it to false")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(tie_word_embeddings=False)))
    assert not torch.equal(load(tmp_path).lm_head.weight, load(tmp_path).model.embed_tokens.weight)


def test_old_inverse_frequencies_are_passed_over(checkpoint):
    edit(checkpoint, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(checkpoint)


def test_a_safetensors_file_of_any_name_without_an_index(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    load(checkpoint)


# ------------------------------------------------------------------------------------------------ what is refused


def refused(directory, *words):
    with pytest.raises(WeightError) as error:
        load(directory)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ],
)  # fmt: skip
def test_a_missing_tensor(checkpoint, name):
    edit(checkpoint, lambda t: t.pop(name))
    refused(checkpoint, "lacks", name)


def test_many_missing_tensors_are_counted(checkpoint):
    edit(checkpoint, lambda t: [t.pop(name) for name in list(t) if "layers.0" in name])
    refused(checkpoint, "lacks model.layers.0.", "and 8 more")


def test_a_bias_that_is_promised_and_not_there(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | dict(attention_bias=True)))
    refused(checkpoint, "lacks", "self_attn.k_proj.bias")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.qweight", "model.layers.0.mlp.up_proj.weight_scale_inv",
        "visual.patch_embed.weight",
        "model.embed_tokens.bias", "weight", "score", "lm_head.weight_scale", "model.norm", "model.layers.0.weight",
    ],
)  # fmt: skip
def test_an_extra_tensor(checkpoint, name):
    edit(checkpoint, lambda t: t.update({name: torch.zeros(3)}))
    refused(checkpoint, "unexpected tensor", repr(name))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.qkv_proj.weight",  # our own name of a fused tensor
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.norm.eps",  # an attribute, but no parameter
        "model.norm.forward",
    ],
)
def test_an_extra_tensor_with_a_name_of_our_own(checkpoint, name):
    edit(checkpoint, lambda t: t.update({name: torch.zeros(3)}))
    refused(checkpoint, "unexpected tensor", repr(name))


@pytest.mark.parametrize(
    "name, change",
    [
        ("model.embed_tokens.weight", lambda t: t[:-1]),
        ("lm_head.weight", lambda t: t[:, :-1]),
        ("model.norm.weight", lambda t: t[None]),
        ("model.layers.0.self_attn.k_proj.weight", lambda t: torch.cat((t, t))),
        ("model.layers.0.self_attn.q_proj.weight", lambda t: t.T),
        ("model.layers.0.mlp.gate_proj.weight", lambda t: t.flatten()),
        ("model.layers.0.mlp.down_proj.weight", lambda t: t.T),
    ],
)
def test_a_tensor_of_the_wrong_shape(checkpoint, name, change):
    shapes = []

    def spoil(tensors):
        shapes.append(list(tensors[name].shape))
        tensors[name] = change(tensors[name]).contiguous()
        shapes.append(list(tensors[name].shape))

    edit(checkpoint, spoil)
    refused(checkpoint, repr(name), f"shape {shapes[1]}, expected {shapes[0]}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_a_tensor_that_is_no_floating_point_one(checkpoint, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(checkpoint, lambda t: t.update({name: t[name].to(dtype)}))
    refused(checkpoint, name, f"dtype {str(dtype).removeprefix('torch.')}", "GGUF")


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite(tmp_path, architecture, value):
    """Every one of them, wherever in it the value is, and whatever it is fused with."""
    tiny.save(tmp_path, architecture, num_hidden_layers=1, attention_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, name in enumerate(tensors):
        spoilt = tensors[name].flatten().clone()
        spoilt[(0, len(spoilt) // 2, -1)[i % 3]] = value
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
    model = load_model(checkpoint, NATIVE, torch.float32, CPU, 16, TensorParallel(3, 4))
    assert model.model.embed_tokens.weight.eq(0).all() and reference.lm_head.weight.shape[0] == 3


def test_a_tied_head_of_the_wrong_shape(tmp_path):
    tiny.save(tmp_path, "llama", num_hidden_layers=1, tie_word_embeddings=True)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(3, 3)}))
    refused(tmp_path, "'lm_head.weight'", "shape [3, 3]")


def test_a_tensor_that_occurs_twice(checkpoint):
    save_file({"model.norm.weight": torch.zeros(48)}, checkpoint / "more.safetensors")
    refused(checkpoint, "'model.norm.weight' occurs twice")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file(checkpoint, keep):
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(checkpoint, "model.safetensors", "corrupt or truncated", "download it again")


def test_a_file_that_cannot_be_read(checkpoint):
    file = checkpoint / "model.safetensors"
    file.unlink()
    file.mkdir()
    refused(checkpoint, str(file), "cannot be read")


def test_a_file_with_a_spoilt_header(checkpoint):
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"!!!!"
    path.write_bytes(content)
    refused(checkpoint, "model.safetensors", "corrupt or truncated")


def test_a_missing_shard(tmp_path):
    tiny.save(tmp_path, "qwen3", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, shard.name, "not found")


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_spoilt_index(tmp_path, content):
    tiny.save(tmp_path, "qwen3", max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "/etc/hostname", "a/../../x.safetensors"])
def test_an_index_that_names_a_file_outside_of_the_directory(tmp_path, outside):
    """A checkpoint must not read what its directory does not hold, even if that is a right file."""
    tiny.save(tmp_path / "model", num_hidden_layers=1)
    tiny.save(tmp_path / "other", num_hidden_layers=1)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": outside}}))
    refused(tmp_path / "model", str(index), "weight_map", repr(outside), "outside of the model's directory")


@pytest.mark.parametrize("layers", [3, 10**6, 2**31 - 1])
def test_more_layers_than_the_files_hold_are_refused_before_they_are_built(tmp_path, layers, monkeypatch):
    tiny.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=layers)))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    refused(tmp_path, str(tmp_path), f"num_hidden_layers={layers}", "the files hold 2 layers")


def test_shapes_are_compared_before_memory_is_taken(tmp_path):
    """A vocabulary of 2^31 - 1 rows of 48: 200 GB in bfloat16 each for embedding and head."""
    tiny.save(tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(vocab_size=2**31 - 1)))
    refused(tmp_path, "has shape [199, 48], expected [2147483647, 48]")


@pytest.mark.parametrize(
    "content, said",
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": ' + "9" * 400 + "}", "num_attention_heads="),
        ('{"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1' + "0" * 400 + ', "num_attention_heads": 1,'
         ' "hidden_size": 2}', "rms_norm_eps="),
    ],
    ids=["deep", "more digits than Python reads", "a huge count", "an integer beyond floats"],
)  # fmt: skip
def test_a_config_with_absurd_values_is_an_error_that_names_the_file(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as error:
        locate(EngineConfig(str(tmp_path)))
    assert str(tmp_path / "config.json") in str(error.value) and said in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickles_are_named_and_never_opened(checkpoint, name):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint / "sprung"),)

    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Trap()))
    refused(checkpoint, name, "never opened", "convert them to safetensors")
    assert not (checkpoint / "sprung").exists()


def test_a_directory_without_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "holds no .safetensors file", 'load_format="dummy"')


# ------------------------------------------------------------------------------------------------ random weights


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_random_weights_need_only_a_config(tmp_path, architecture):
    tiny.save(tmp_path, architecture, attention_bias=True)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy")
    # Kernels read parameters early, and nothing else (`are_constant`): what layers hand to them is one, or a step gets
    # slower.
    held = [m.__dict__ | m._parameters for m in model.modules()]
    assert all(
        type(h[name]) is torch.nn.Parameter for h in held for name in ("weight", "bias") if h.get(name) is not None
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert abs(parameter.std().item() - 0.02) < 0.002 and abs(parameter.mean().item()) < 0.002, name
    again = load(tmp_path, load_format="dummy")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


# ------------------------------------------------------------------------------------------------ where it is


def test_a_directory(checkpoint):
    found = locate(EngineConfig(str(checkpoint)))
    assert (found.path, found.format, found.config.architecture) == (checkpoint, "safetensors", "Qwen3ForCausalLM")
    assert locate(EngineConfig(str(checkpoint), load_format="dummy")).format == "dummy"


def test_the_home_directory_is_expanded(checkpoint, monkeypatch):
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert locate(EngineConfig(f"~/{checkpoint.name}")).path == checkpoint


def test_a_preset():
    found = locate(EngineConfig("Qwen3-0.6B", load_format="dummy"))
    assert (found.path, found.format, found.config.hidden_size) == (None, "dummy", 1024)


def not_found(error_type, model, *words, **arguments):
    with pytest.raises(error_type) as error:
        locate(EngineConfig(str(model), **arguments))
    for word in words:
        assert word in str(error.value)


def test_a_preset_without_dummy_weights():
    not_found(
        ValueError, "qwen3-0.6b", "'qwen3-0.6b' is a preset", "'Qwen/Qwen3-0.6B'", 'in Python, load_format="dummy"'
    )


def test_an_unknown_preset():
    not_found(ValueError, "qwen3-0.7b", "no preset 'qwen3-0.7b'", "did you mean 'qwen3-", load_format="dummy")


def test_a_directory_without_a_config(tmp_path):
    not_found(FileNotFoundError, tmp_path, str(tmp_path), "holds no config.json", "pass a Hugging Face model directory")


def test_a_config_that_is_cut_off(checkpoint):
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text()[:40])
    not_found(ValueError, checkpoint, "config.json is not valid JSON")


def test_a_config_that_is_no_object(checkpoint):
    (checkpoint / "config.json").write_text("[]")
    not_found(ValueError, checkpoint, "config.json holds no JSON object")


@pytest.mark.parametrize(
    "config",
    [
        dict(architectures=["Qwen3MoeForCausalLM"]),
        dict(architectures=["MistralForCausalLM"]),
        # Those that do not even have the entries of a decoder that we know.
        dict(architectures=["GPT2LMHeadModel"], n_head=12, n_embd=768),
        dict(architectures=["GemmaForCausalLM"], hidden_act="gelu_pytorch_tanh"),
        dict(architectures=["Phi3ForCausalLM"], rope_parameters=dict(rope_type="longrope")),
    ],
    ids=lambda c: c["architectures"][0],
)
def test_an_unsupported_architecture_lists_the_supported(checkpoint, config):
    path = checkpoint / "config.json"
    common = {} if "n_head" in config else json.loads(path.read_text())
    path.write_text(json.dumps(common | config))
    name = config["architectures"][0]
    not_found(ValueError, checkpoint, repr(name), "supported are LlamaForCausalLM, Qwen3ForCausalLM")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    not_found(ValueError, tmp_path / "model.safetensors", "no .gguf", "pass the directory that holds config.json")


def test_a_gguf_file_that_is_not_there(tmp_path):
    not_found(FileNotFoundError, tmp_path / "model.gguf", "model.gguf", "no such file")


def test_formats_that_contradict_what_is_there(checkpoint, tmp_path):
    not_found(ValueError, checkpoint, "is no .gguf file", load_format="gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    not_found(ValueError, tmp_path / "model.gguf", "is a GGUF file", load_format="safetensors")


@pytest.mark.parametrize("name", ["no-such-directory", "someone/no-such-model", "not a hub id!", "/no/such/directory"])
def test_what_is_nowhere_while_offline(name, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    not_found(FileNotFoundError, name, repr(name))


def test_a_network_that_fails_is_not_a_traceback(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(model_id, local_files_only=False, **_):
        raise LocalEntryNotFoundError("nothing cached") if local_files_only else ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    not_found(FileNotFoundError, "someone/model", "'someone/model'", "could not be downloaded", "ConnectionError")


@pytest.mark.parametrize("cached, expected", [(True, [True]), (False, [True, False])])
def test_a_hub_id_comes_from_the_cache_and_only_then_from_the_network(monkeypatch, checkpoint, cached, expected):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls = []

    def snapshot_download(model_id, allow_patterns, local_files_only=False):
        assert model_id == "someone/model" and not [
            p for p in allow_patterns if Path(p).suffix in (".bin", ".pt", ".py", "")
        ]
        calls.append(local_files_only)
        if local_files_only and not cached:
            raise LocalEntryNotFoundError("nothing cached")
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate(EngineConfig("someone/model")).path == checkpoint and calls == expected


def test_tensors_are_read_one_at_a_time(checkpoint):
    seen = {name: tensor.shape for name, tensor in iter_tensors(checkpoint)}
    assert seen["model.norm.weight"] == (48,) and len(seen) == 14


@pytest.mark.parametrize("name", ["qwen3-0.6b", "smollm2-135m"])
def test_bytes_of_parameters_count_tied_weights_once(name):
    config = ModelConfig.from_dict(PRESETS[name] | dict(num_hidden_layers=1))
    from nanovllm.models.registry import model_class

    with torch.device("meta"):
        model = model_class(config.architecture)(config, 8, NATIVE).to(torch.bfloat16)
    assert parameter_bytes(model) == 2 * sum(math.prod(p.shape) for p in model.parameters())
