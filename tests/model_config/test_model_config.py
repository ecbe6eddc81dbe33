"""A model's config.json: what is read of it, what is refused and how that is said."""

import pytest

from nanovllm.model_config import ModelConfig, RopeConfig
from tests import tiny

QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
LLAMA = QWEN3 | dict(architectures=["LlamaForCausalLM"])


def test_fields_of_a_config():
    config = ModelConfig.from_dict(
        QWEN3 | dict(
            head_dim=24, rms_norm_eps=1e-5, max_position_embeddings=777, rope_parameters=dict(rope_type="default",
            rope_theta=1e6),
            tie_word_embeddings=True, attention_bias=True, eos_token_id=[7, 8], dtype="bfloat16",
            use_custom_kernels=False, more=1,
        )
    )  # fmt: skip
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("Qwen3ForCausalLM", 100, 64)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (4, 2, 24)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.rope) == (1e-5, 777, RopeConfig(1e6))
    assert config.tie_word_embeddings and config.attention_bias and not config.mlp_bias
    assert (config.eos_token_ids, config.dtype, config.use_custom_kernels) == ((7, 8), "bfloat16", False)
    assert config.raw["more"] == 1


@pytest.mark.parametrize("entries, architecture", [(QWEN3, "Qwen3Config"), (LLAMA, "LlamaConfig")])
def test_missing_entries_take_the_defaults_of_transformers(entries, architecture):
    import transformers

    entries = entries | dict(num_attention_heads=64, hidden_size=256)
    given = {k: v for k, v in entries.items() if k != "architectures"}
    theirs = getattr(transformers, architecture)(**given)
    ours = ModelConfig.from_dict(entries)
    del entries["num_key_value_heads"]
    theirs_alone = getattr(transformers, architecture)(**{k: v for k, v in entries.items() if k != "architectures"})
    assert ModelConfig.from_dict(entries).num_kv_heads == theirs_alone.num_key_value_heads
    for name in ("head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] and ours.rope.scaling_type == "default"


@pytest.mark.parametrize("eos, expected", [(None, ()), (0, (0,)), (2, (2,)), ([1, 2], (1, 2))])
def test_end_tokens(eos, expected):
    assert ModelConfig.from_dict(LLAMA | dict(eos_token_id=eos)).eos_token_ids == expected


@pytest.mark.parametrize(
    "entry, expected",
    [(dict(torch_dtype="float16"), "float16"), (dict(dtype="torch.bfloat16"), "bfloat16"), (dict(dtype=None), None)],
)
def test_dtype(entry, expected):
    assert ModelConfig.from_dict(LLAMA | entry).dtype == expected


def test_multi_head_attention_where_key_value_heads_are_unsaid():
    assert ModelConfig.from_dict(LLAMA | dict(num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    "entries, said",
    [
        (dict(hidden_size=None), "no 'hidden_size'"),
        (dict(vocab_size=None), "no 'vocab_size'"),
        (dict(architectures=None), "architectures=[]"),
        (dict(architectures=["A", "B"]), "exactly one is expected"),
        (dict(num_key_value_heads=3), "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        (dict(hidden_act="relu"), "hidden_act='relu' is not supported; supported are 'silu', 'gelu'"),
        (dict(use_sliding_window=True, sliding_window=16), "sliding_window=16 is not supported; set it to null"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "attention']: only a list of 'full_attention'"),
        (dict(sliding_window=16), "sliding_window=16 is not supported; set it to null"),
        (dict(head_dim=17), "head_dim=17 is not supported; it must be even"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e6))),
            "rope_parameters of its own for 'full_attention' is not supported",
        ),
        (dict(dtype="int4"), "dtype='int4' is not supported"),
        (dict(use_custom_kernels="false"), "config.json: use_custom_kernels='false': must be true or false"),
        (
            dict(rope_scaling=dict(rope_type="longrope")),
            "rope_type='longrope' needs short_factor, long_factor, original_max_position_embeddings beside it",
        ),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type='dynamic' is not supported"),
    ],
)
def test_unsupported_models_say_what_is_wrong(entries, said):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(LLAMA | entries)
    assert said in str(error.value)


@pytest.mark.parametrize("window", [dict(), dict(use_sliding_window=False), dict(use_sliding_window=None)])
def test_a_sliding_window_that_has_no_effect_is_passed_over(window):
    assert ModelConfig.from_dict(QWEN3 | dict(sliding_window=4096) | window).num_hidden_layers == 2
    assert ModelConfig.from_dict(LLAMA | dict(sliding_window=None) | window).num_hidden_layers == 2


SLIDES = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)


@pytest.mark.parametrize(
    "architecture, entries",
    [
        ("qwen3", dict(use_sliding_window=False, sliding_window=8)),
        ("llama", dict(use_sliding_window=False, sliding_window=8)),
        ("llama", dict(use_sliding_window=True)),
        ("qwen3", SLIDES | dict(layer_types=["full_attention"] * 2)),
        ("llama", SLIDES | dict(layer_types=["full_attention"] * 2)),
    ],
    ids=str,
)
def test_a_window_that_transformers_does_not_apply_is_passed_over(architecture, entries):
    """In one forward, that is: the cache of its `generate` has another opinion on the second of these."""
    prompt = list(range(40))
    theirs = tiny.model(architecture, **entries)
    assert tiny.logprobs(theirs, prompt).equal(tiny.logprobs(tiny.model(architecture), prompt))
    assert ModelConfig.from_dict((QWEN3 if architecture == "qwen3" else LLAMA) | entries).num_hidden_layers == 2


@pytest.mark.parametrize("architecture, entries", [("qwen3", QWEN3), ("llama", LLAMA)])
def test_biases_are_those_of_transformers(architecture, entries):
    """attention_bias is read by both, mlp_bias by Llama alone."""
    biases = dict(attention_bias=True, mlp_bias=True)
    ours = ModelConfig.from_dict(entries | biases)
    theirs = tiny.model(architecture, **biases).model.layers[0]
    q_bias, o_bias = (getattr(theirs.self_attn, f"{name}_proj").bias is not None for name in "qo")
    assert ours.attention_bias == q_bias == o_bias
    assert ours.mlp_bias == (theirs.mlp.up_proj.bias is not None) == (theirs.mlp.down_proj.bias is not None)
    assert ours.mlp_bias == (architecture == "llama")


JUNK = [0, -1, -0.5, 2.5, "4", "x", "", True, [], [1, 2], {"a": 1}, float("nan"), float("inf")]


@pytest.mark.parametrize(
    "name, allowed",
    [
        *((name, ()) for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        )),
        ("rms_norm_eps", (0, 2.5)),
        ("eos_token_id", (0, -1, [], [1, 2])),
        *((name, (True,)) for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_custom_kernels")),
        ("use_sliding_window", (True,)),
        ("layer_types", ([],)),
        ("architectures", ()),
        ("rope_theta", (2.5,)),
        ("rope_parameters", (0, "", [], {"a": 1})),
        ("rope_scaling", (0, "", [], {"a": 1})),
    ],
)  # fmt: skip
def test_what_is_no_value_for_an_entry_is_an_error_that_names_both(name, allowed):
    for junk in JUNK:
        if any(junk is value or (junk == value and type(junk) is type(value)) for value in allowed):
            ModelConfig.from_dict(LLAMA | {name: junk})
            continue
        with pytest.raises(ValueError) as error:
            ModelConfig.from_dict(LLAMA | {name: junk})
        assert "config.json: " in str(error.value) and name in str(error.value), (junk, error.value)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_what_is_no_number_in_a_rope_scaling_is_named(kind):
    rope = dict(rope_type=kind, factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=1e4)
    rope["original_max_position_embeddings"] = 32
    names = [*RopeConfig.REQUIRED[kind], "rope_theta", *(["attention_factor", "beta_fast"] if kind == "yarn" else [])]
    for name in names:
        for junk in ("x", [], -1, True, float("nan")):
            with pytest.raises(ValueError, match=f"config.json: {name}="):
                ModelConfig.from_dict(QWEN3 | dict(rope_parameters=rope | {name: junk}))
    assert ModelConfig.from_dict(QWEN3 | dict(rope_parameters=rope)).rope.scaling_type == kind


LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=8)


@pytest.mark.parametrize(
    "rope, said",
    [
        (LLAMA3 | dict(low_freq_factor=4.0, high_freq_factor=4), "low_freq_factor=4.0 must be below"),
        (dict(rope_type=["yarn"]), "rope_type=.*not supported"),
        (dict(rope_type="linear"), "'linear' needs factor"),
        (dict(rope_type="llama3", factor=8.0), "'llama3' needs low_freq_factor, high_freq_factor"),
        (dict(rope_type="yarn"), "'yarn' needs factor"),
        (dict(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_incomplete_rope_scaling_says_what_is_missing(rope, said):
    config = LLAMA | {"rope_scaling": rope}
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_dict(config)


THETA = dict(rope_type="default", rope_theta=1e6)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)


def test_rope_scaling_beside_rope_parameters_is_not_passed_over():
    """What a model card says to add to a config.json, in one that transformers 5 wrote: it would have no effect."""
    with pytest.raises(ValueError, match="rope_scaling=.*yarn.* and rope_parameters=.*default.* contradict each other"):
        ModelConfig.from_dict(QWEN3 | dict(rope_scaling=YARN, rope_parameters=THETA))
    both = dict(rope_scaling=YARN, rope_theta=1e6, rope_parameters=YARN | dict(rope_theta=1e6))
    alone = dict(rope_scaling=YARN, rope_theta=1e6)
    assert ModelConfig.from_dict(QWEN3 | both).rope == ModelConfig.from_dict(QWEN3 | alone).rope
    assert ModelConfig.from_dict(QWEN3 | dict(rope_scaling=None, rope_parameters=THETA)).rope == RopeConfig(1e6)


@pytest.mark.parametrize(
    "rope, longest",
    [(YARN, 256), (YARN | dict(factor=1.5), 100), (dict(rope_type="linear", factor=8.0), 100), (THETA, 100)],
)
def test_yarn_extends_the_longest_sequence(rope, longest):
    config = QWEN3 | dict(max_position_embeddings=100, rope_parameters=rope)
    assert ModelConfig.from_dict(config).max_position_embeddings == longest


@pytest.mark.parametrize("inside", [64, None])
@pytest.mark.parametrize("beside", [32, None])
def test_the_original_length_is_that_of_transformers_wherever_it_stands(inside, beside):
    import transformers

    rope = YARN | dict(original_max_position_embeddings=inside)
    entries = dict(rope_parameters={k: v for k, v in rope.items() if v is not None}, max_position_embeddings=256)
    entries |= {} if beside is None else dict(original_max_position_embeddings=beside)
    theirs = transformers.Qwen3Config(**{k: v for k, v in (QWEN3 | entries).items() if k != "architectures"})
    theirs.standardize_rope_params()  # as a model does when it is made
    ours = dict(ModelConfig.from_dict(QWEN3 | entries).rope.scaling)
    name = "original_max_position_embeddings"
    assert ours[name] == theirs.rope_parameters[name] == (beside or inside or 256)


@pytest.mark.parametrize("layers", [10_001, 2**31 - 1])
def test_more_layers_than_any_model_has(layers):
    with pytest.raises(ValueError, match=f"num_hidden_layers={layers}: must be at most 10000"):
        ModelConfig.from_dict(QWEN3 | dict(num_hidden_layers=layers))
