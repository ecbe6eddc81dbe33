"""Architectures' own entries of a config.json: defaults are those of transformers, bad values are named."""

import pytest

from nanovllm.model_config import FAMILIES, LayerConfig, ModelConfig
from tests import tiny

BASE = dict(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=8,
)  # fmt: skip


def parse(architecture, **entries):
    return ModelConfig.from_dict(BASE | dict(architectures=[f"{architecture}ForCausalLM"]) | entries)


def theirs(architecture, **entries):
    import transformers

    names = {model: config for config, model in tiny.CLASSES.values()}
    return getattr(transformers, names[f"{architecture}ForCausalLM"])(**BASE | entries)


@pytest.mark.parametrize(
    "entries", [{}, dict(num_key_value_heads=4, sliding_window=9), dict(use_sliding_window=True, sliding_window=9)]
)
@pytest.mark.parametrize("name", [name.removesuffix("ForCausalLM") for name in FAMILIES])
def test_missing_entries_take_the_defaults_of_transformers(name, entries):
    if name in ("Llama", "Qwen3", "Qwen2") and "num_key_value_heads" not in entries:
        entries = entries | dict(num_key_value_heads=8)
    if name == "Llama":
        entries = {key: value for key, value in entries.items() if "window" not in key}
    ours, expected = parse(name, **entries), theirs(name, **entries)
    heads = expected.hidden_size // expected.num_attention_heads
    assert ours.head_dim == (getattr(expected, "head_dim", None) or heads)
    assert ours.num_kv_heads == expected.num_key_value_heads
    for entry in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, entry) == getattr(expected, entry), entry
    kinds = getattr(expected, "layer_types", None)
    window = getattr(expected, "sliding_window", None)
    windows = [window] * 7 if kinds is None else [window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in ours.layers] == ([None] * 7 if name == "Llama" else windows)
    expected.standardize_rope_params()
    ropes = expected.rope_parameters
    ropes = [ropes[kind] for kind in ("full_attention", "sliding_attention")] if name == "Gemma3" else [ropes]
    assert [rope.theta for rope in ours.ropes] == [rope["rope_theta"] for rope in ropes]
    rotated = [bool(flag) for flag in getattr(expected, "no_rope_layers", [1] * 7)]
    assert [layer.rope is not None for layer in ours.layers] == rotated


def test_gemma_reads_two_rotations_in_either_form():
    linear = dict(rope_type="linear", factor=8.0)
    old = parse("Gemma3", rope_theta=1e5, rope_local_base_freq=500.0, rope_scaling=linear)
    new = parse("Gemma3", rope_parameters=dict(
        full_attention=linear | dict(rope_theta=1e5), sliding_attention=dict(rope_type="default", rope_theta=500.0)
    ))  # fmt: skip
    assert old.ropes == new.ropes and [rope.theta for rope in new.ropes] == [1e5, 500.0]
    assert [rope.scaling_type for rope in new.ropes] == ["linear", "default"]
    assert new.layers == (*[LayerConfig(4096, 1)] * 5, LayerConfig(None, 0), LayerConfig(4096, 1))


def test_old_names_of_long_rope():
    factors = dict(short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    config = dict(original_max_position_embeddings=32, max_position_embeddings=128)
    for name in ("su", "yarn", "longrope"):
        (rope,) = parse("Phi3", rope_scaling=dict(type=name, **factors), **config).ropes
        assert rope.scaling_type == "longrope" and dict(rope.scaling)["factor"] == 4


QWEN = dict(num_key_value_heads=8)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)


@pytest.mark.parametrize(
    "architecture, entries, said",
    [
        ("Phi3", dict(rope_scaling=dict(type="dynamic")), "rope_type='dynamic' is not supported; supported"),
        ("Phi3", dict(rope_scaling=LONG | dict(long_factor=[1.0] * 3)), r"long_factor=\[.*: must be a list of 4"),
        ("Phi3", dict(rope_scaling=LONG | dict(short_factor=[1, 2, 3, -4])), r"short_factor=\[1, 2, 3, -4\]: must be"),
        ("Phi3", dict(rope_scaling=LONG | dict(short_factor="x")), "short_factor='x': must be a list of numbers"),
        ("Phi3", dict(rope_scaling=LONG, original_max_position_embeddings=1), "embeddings=1: must be above 1"),
        ("Phi3", dict(partial_rotary_factor=0.4), "partial_rotary_factor=0.4 rotates 3 of the 8 elements"),
        ("Phi3", dict(partial_rotary_factor=1.5), "partial_rotary_factor=1.5: must be a number above 0, at most 1"),
        ("Phi3", dict(sliding_window=0), "sliding_window=0: must be a positive integer"),
        ("Phi3", dict(sliding_window=8, layer_types=["full_attention"] * 7), "expected only 'sliding_attention'"),
        ("Mistral", dict(sliding_window=-1), "sliding_window=-1: must be a positive integer"),
        ("Mistral", dict(sliding_window="8"), "sliding_window='8': must be a positive integer"),
        ("Qwen2", QWEN | dict(use_sliding_window=True, max_window_layers="x"), "max_window_layers='x': must be"),
        ("Qwen2", QWEN | dict(layer_types=["sliding_attention"] * 7), "but use_sliding_window is not true"),
        ("Qwen2", QWEN | dict(layer_types=["full_attention"]), "has 1 entries, but num_hidden_layers=7"),
        ("Qwen2", QWEN | dict(layer_types=["chunked_attention"] * 7), "only a list of 'full_attention' and 'sli"),
        ("SmolLM3", dict(no_rope_layers=[1, 0]), r"no_rope_layers=\[1, 0\]: must be .*, one for each of 7"),
        ("SmolLM3", dict(no_rope_layers=[1, 0, 2, 1, 1, 1, 1]), "no_rope_layers=.*must be a list of 0 and 1"),
        ("SmolLM3", dict(no_rope_layer_interval=0), "no_rope_layer_interval=0: must be a positive integer"),
        ("Gemma3", dict(sliding_window=None), "has 'sliding_attention', but sliding_window is null"),
        ("Gemma3", dict(sliding_window_pattern=0), "sliding_window_pattern=0: must be a positive integer"),
        ("Gemma3", dict(hidden_activation="relu"), "hidden_activation='relu' is not supported; supported are 'silu'"),
        ("Gemma3", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0: must be a number above 0"),
        ("Gemma3", dict(query_pre_attn_scalar=None), "query_pre_attn_scalar=None: must be a number above 0"),
        ("Gemma3", dict(final_logit_softcapping=-3), "final_logit_softcapping=-3: must be a number above 0, or null"),
        ("Gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported"),
        ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("Qwen2", QWEN | dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("Gemma3", dict(rope_parameters=dict(rope_type="default")), "rope_parameters=.*must be an object with 'fu"),
        (
            "Gemma3",
            dict(rope_scaling=dict(rope_type="yarn", factor=4.0, truncate=False)),
            "truncate=False is not supported where layers have rotations of their own",
        ),
        ("Gemma3", dict(rope_parameters=[1]), r"rope_parameters=\[1\]: must be an object"),
        (
            "Gemma3",
            dict(rope_scaling=dict(rope_type="linear", factor=8.0), rope_parameters=dict(full_attention=dict(
                rope_type="default", rope_theta=1e6))),
            "contradict each other",
        ),
        ("Gemma2", dict(attn_logit_softcapping="x"), "attn_logit_softcapping='x': must be a number above 0"),
        ("Gemma3", dict(text_config=dict(hidden_size=1)), "has a text_config beside other parts; only models of text"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(architecture, entries, said):
    with pytest.raises(ValueError, match=f"^config.json: .*{said}"):
        parse(architecture, **entries)
