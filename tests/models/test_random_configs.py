"""Random config.json files: the model is transformers' to 1e-3 in every log-probability, or refused with a word on the
entry.

The weights are random too. Entries are drawn that change a model (rope in both formats, windows, activations, biases),
so that one which is passed over shows as another model.
"""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from tests import tiny

NUM_CONFIGS = 15  # a seed


def rope(rng: random.Random) -> dict:
    kind = rng.choice(["default", "linear", "yarn", "yarn", "llama3", "dynamic", "longrope", "proportional"])
    entries = {rng.choice(["rope_type", "type"]): kind}
    if kind != "default":
        entries["factor"] = rng.choice([1.0, 1.5, 4, 32.0])
    if kind in ("yarn", "llama3", "longrope") and rng.random() < 0.8:
        entries["original_max_position_embeddings"] = rng.choice([16, 32, 100])
    if kind == "yarn":
        options = dict(attention_factor=1.3, beta_fast=4, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.5, truncate=False)
        entries |= {name: value for name, value in options.items() if rng.random() < 0.25}
    elif kind == "llama3":
        entries |= dict(low_freq_factor=rng.choice([1.0, 2]), high_freq_factor=rng.choice([4.0, 8]))
    elif kind == "longrope":
        entries |= dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    return entries


KINDS = {
    "Qwen3": "qwen3", "Llama": "llama", "Qwen2": "qwen2", "Mistral": "mistral", "SmolLM3": "smollm3", "Phi3": "phi3",
    "Gemma2": "gemma2", "Gemma3": "gemma3_text",
    "Qwen3Moe": "qwen3_moe",
}  # fmt: skip


def draw(rng: random.Random, kind: str) -> dict:
    layers, head_dim = rng.choice([1, 2, 3]), rng.choice([16, 18, 40, 80])
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7])
    config = dict(
        architectures=[f"{kind}ForCausalLM"], model_type=KINDS[kind], vocab_size=rng.choice([17, 131, 320]),
        hidden_size=kv_heads * group * rng.choice([4, 10, 16]), intermediate_size=rng.choice([30, 64]),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=rng.choice([64, 256]), tie_word_embeddings=rng.random() < 0.5, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    if kind == "Phi3":
        config["hidden_size"] = kv_heads * group * head_dim
    if kind == "Qwen3Moe":
        config["hidden_size"] = kv_heads * group * 16  # transformers multiplies rows of whole 16 bytes
        experts = rng.choice([3, 8])
        config |= {rng.choice(["num_experts", "num_local_experts"]): experts, "num_experts_per_tok": rng.choice([1, 3])}
        config |= dict(moe_intermediate_size=rng.choice([16, 36]), norm_topk_prob=rng.random() < 0.5)
        config |= rng.choice([{}, dict(decoder_sparse_step=2), dict(mlp_only_layers=[0]), dict(mlp_only_layers=None)])
    sometimes = dict(
        attention_bias=True, rms_norm_eps=0.1, hidden_act="gelu", use_sliding_window=rng.random() < 0.5,
        layer_types=[rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)], max_window_layers=0,
        original_max_position_embeddings=16, partial_rotary_factor=0.5,
    )  # fmt: skip
    config |= {name: value for name, value in sometimes.items() if rng.random() < 0.1}
    own = dict(
        no_rope_layers=[rng.choice([0, 1]) for _ in range(layers)], no_rope_layer_interval=2, sliding_window_pattern=2,
        hidden_activation="gelu", query_pre_attn_scalar=rng.choice([8, 30]), rope_local_base_freq=500.0,
        final_logit_softcapping=rng.choice([None, 3.0]), attn_logit_softcapping=rng.choice([None, 2.0]),
        sliding_window=rng.choice([None, 8]),
    )  # fmt: skip
    usual = kind not in ("Llama", "Qwen3")
    config |= {name: value for name, value in own.items() if rng.random() < (0.4 if usual else 0.1)}
    if rng.random() < 0.3:
        config["mlp_bias"] = True
    form = rng.choice(["none", "old", "new", "new", "both"])
    if form in ("old", "both"):
        config |= dict(rope_theta=rng.choice([100.0, 5e5]), rope_scaling=rng.choice([None, rope(rng)]))
    if form in ("new", "both"):
        config["rope_parameters"] = rope(rng) | dict(rope_theta=rng.choice([100.0, 7000]))
        if kind == "Gemma3":
            config["rope_parameters"] = dict(
                full_attention=config["rope_parameters"], sliding_attention=dict(rope_type="default", rope_theta=300.0)
            )
    return config


def randomize(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 1 / max(48, parameter.shape[1]) ** 0.5, generator=generator)


def as_stored(weights):
    """(name, tensor) of a model's weights; experts, which transformers stacks, one by one as in a checkpoint."""
    for name, tensor in weights.items():
        parent, _, leaf = name.rpartition(".")
        if not parent.endswith(".experts"):
            yield name, tensor
            continue
        names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for i, expert in enumerate(tensor):
            yield from zip((f"{parent}.{i}.{which}.weight" for which in names), expert.chunk(len(names)))


@torch.no_grad()
@pytest.mark.parametrize("seed", range(7))
def test_a_config_is_served_as_transformers_does_or_refused(tmp_path, seed):
    from transformers import AutoConfig, AutoModelForCausalLM

    rng, served = random.Random(seed), 0
    for i in range(NUM_CONFIGS):
        kinds = ["Qwen3", "Llama"] if seed < 3 else ["Qwen3Moe"] if seed == 6 else list(KINDS)
        kind = rng.choice(kinds)
        config = draw(rng, kind)
        prompt_len, longest = rng.choice([10, 60, 200]), {}
        if "longrope" in str(config):  # the longest sequence that is served decides on the frequencies
            longest = dict(max_model_len=min(prompt_len + 1, config["max_position_embeddings"]))
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        try:
            theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32).eval()
        except Exception:  # it has many types for what it refuses
            continue
        randomize(theirs, i)
        weights = {name: tensor.clone() for name, tensor in as_stored(theirs.state_dict())}
        if config["tie_word_embeddings"]:
            del weights["lm_head.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        try:
            llm = LLM(
                tmp_path, device="cpu", dtype="float32", skip_tokenizer_init=True, kvcache_block_size=16,
                num_kvcache_blocks=16, max_num_seqs=1,
                **longest,
            )  # fmt: skip
        except ValueError as error:
            assert str(error).startswith(f"{tmp_path / 'config.json'}: "), (config, error)
            continue
        prompt = [rng.randrange(config["vocab_size"]) for _ in range(llm.engine.runner.max_model_len - 1)]
        prompt = prompt[:prompt_len]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        expected = tiny.logprobs(theirs, prompt)
        for position, token in enumerate(prompt[1:]):
            ours = output.prompt_logprobs[position + 1][token].logprob
            assert ours == pytest.approx(float(expected[position, token]), abs=1e-3), config
        served += 1
    assert served > NUM_CONFIGS // 5
