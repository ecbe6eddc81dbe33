"""Checkpoints of models that read images too: their model of text is served."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.text_part import text_tensor
from tests import tiny
from tests.weights.checkpoints import configure, edit, refused
from tests.weights.quantised_files import FORMATS, write
from tests.weights.test_quantised_checkpoints import GREEDY, OPTIONS, PACKED, loaded, packed_names, prompts, tokens

TEXT = dict(
    vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
IMAGES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
SCALED = dict(rope_type="linear", factor=8.0, rope_theta=1e6)
LOCAL = dict(rope_type="default", rope_theta=1e4)
MODELS = {
    "gemma3": (
        "Gemma3", TEXT | dict(sliding_window=9, rope_parameters=dict(full_attention=SCALED, sliding_attention=LOCAL)),
        dict(vision_config=IMAGES, mm_tokens_per_image=4, tie_word_embeddings=True),
    ),
    "mistral3": (
        "Mistral3", TEXT | dict(model_type="mistral"),
        dict(vision_config=IMAGES | dict(model_type="pixtral", head_dim=16), tie_word_embeddings=False),
    ),
}  # fmt: skip


def save(directory, name):
    """A random model of transformers as it saves it, in float32."""
    import transformers

    kind, text, entries = MODELS[name]
    config = getattr(transformers, kind + "Config")(text_config=text, image_token_id=198, **entries)
    made = getattr(transformers, kind + "ForConditionalGeneration")(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.15, generator=generator)
    made.save_pretrained(directory)
    made.generation_config.eos_token_id = None
    return made.requires_grad_(False)


def as_of_transformers_5(name):
    inner = name.removeprefix("language_model.")
    if inner == name:
        return f"model.{name}"
    return inner.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    want = tiny.greedy_each(save(tmp_path, name), prompts(190), GREEDY.max_tokens)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in stored)
    for rename in (str, as_of_transformers_5):
        save_file({rename(name): tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
        for mode in ({}, dict(use_custom_kernels=False)):
            outputs = LLM(tmp_path, **OPTIONS, **mode).generate(prompts(190), GREEDY, use_tqdm=False)
            assert [o["token_ids"] for o in outputs] == want
    assert len({token for tokens in want for token in tokens}) > 4


def test_rules_of_a_quantised_checkpoint_name_modules_as_its_files_do(tmp_path):
    reference = write(tmp_path, FORMATS["w4a16"], "gemma3", tie_word_embeddings=True)
    want = tiny.greedy_each(reference, prompts(), GREEDY.max_tokens)
    stored = load_file(tmp_path / "model.safetensors")
    images = {"vision_tower.post_layernorm.weight": torch.zeros(3)}
    save_file({f"language_model.{n}": t for n, t in stored.items()} | images, tmp_path / "model.safetensors")
    group = FORMATS["w4a16"].config["config_groups"]["group_0"] | {"targets": [r"re:language_model\..*_proj$"]}
    rules = FORMATS["w4a16"].config | {"ignore": ["re:vision_tower.*"], "config_groups": {"group_0": group}}
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config")
    whole = dict(architectures=["Gemma3ForConditionalGeneration"], text_config=config, vision_config={})
    (tmp_path / "config.json").write_text(json.dumps(whole | {"quantization_config": rules}))
    assert len(packed_names(loaded(tmp_path))) == 8
    assert tokens(tmp_path, **PACKED) == want == tokens(tmp_path)


def test_published_configurations_leave_entries_out(tmp_path):
    """Those of Gemma 3 4B and of Mistral Small 3.1, as far as they matter."""
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34)
    text |= dict(rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024)
    whole = dict(architectures=["Gemma3ForConditionalGeneration"], eos_token_id=[1, 106], torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(whole | dict(text_config=text, vision_config={})))
    config = locate(EngineConfig(str(tmp_path))).config
    assert (config.architecture, config.dtype, config.eos_token_ids) == ("Gemma3ForCausalLM", "bfloat16", (1, 106))
    assert (config.vocab_size, config.num_attention_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.tie_word_embeddings and [rope.scaling_type for rope in config.ropes] == ["linear", "default"]
    text = dict(TEXT, model_type="mistral", rope_theta=1e9, sliding_window=None)
    whole = dict(architectures=["Mistral3ForConditionalGeneration"], text_config=text, vision_config={})
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = locate(EngineConfig(str(tmp_path))).config
    assert (config.architecture, config.tie_word_embeddings, config.rope.theta) == ("MistralForCausalLM", False, 1e9)


def test_a_model_of_text_of_another_kind(tmp_path):
    text = dict(TEXT, model_type="ministral3")
    whole = dict(architectures=["Mistral3ForConditionalGeneration"], text_config=text, vision_config={})
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError) as error:
        locate(EngineConfig(str(tmp_path)))
    assert f"{tmp_path / 'config.json'}: text_config.model_type='ministral3' is not supported" in str(error.value)


def test_tensors_of_no_part_are_refused(tmp_path):
    save(tmp_path, "mistral3")
    edit(tmp_path, lambda t: t.update({"audio_tower.weight": torch.zeros(1)}))
    refused(tmp_path, str(tmp_path / "model.safetensors"), "unexpected tensor 'audio_tower.weight'")
    edit(tmp_path, lambda t: (t.pop("audio_tower.weight"), t.pop("language_model.lm_head.weight")))
    refused(tmp_path, str(tmp_path), "lacks lm_head.weight")
    configure(tmp_path, tie_word_embeddings=True)
    loaded(tmp_path)


def test_names():
    assert text_tensor("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert text_tensor("model.vision_tower.layers.0.weight") is None
