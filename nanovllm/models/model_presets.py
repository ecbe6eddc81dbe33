"""Published model shapes by name, for `load_format="dummy"`: real shapes, random weights, nothing to download."""

from __future__ import annotations

import difflib
from typing import Any


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return dict(
        architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1e6, max_position_embeddings=40960, tie_word_embeddings=tied, eos_token_id=151645, dtype="bfloat16",
    )  # fmt: skip


def _qwen3_moe(hidden: int, layers: int, heads: int, kv_heads: int, experts: int, intermediate: int) -> dict[str, Any]:
    return _qwen3(hidden, 3 * hidden, layers, heads, tied=False) | dict(
        architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=kv_heads, num_experts=experts,
        num_experts_per_tok=8, moe_intermediate_size=intermediate, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip


def _llama(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, theta: float, max_len: int,
    scaling_factor: float | None = None, **entries: Any,
) -> dict[str, Any]:  # fmt: skip
    config: dict[str, Any] = dict(
        architectures=["LlamaForCausalLM"], vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=1e-5,
        rope_theta=theta, max_position_embeddings=max_len, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    if scaling_factor is not None:
        config["rope_scaling"] = dict(
            rope_type="llama3", factor=scaling_factor, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )  # fmt: skip
    return config | entries


def _qwen2(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> dict[str, Any]:
    return dict(
        architectures=["Qwen2ForCausalLM"], vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=1e-6,
        rope_theta=1e6, max_position_embeddings=32768, tie_word_embeddings=tied, use_sliding_window=False,
        eos_token_id=151645, dtype="bfloat16",
    )  # fmt: skip


def _mistral(
    vocab: int, hidden: int, intermediate: int, layers: int, theta: float, max_len: int, window: int | None = None
) -> dict[str, Any]:
    return dict(
        architectures=["MistralForCausalLM"], vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
        rope_theta=theta, max_position_embeddings=max_len, tie_word_embeddings=False, sliding_window=window,
        eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip


def _phi(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, theta: float, max_len: int,
    **entries: Any,
) -> dict[str, Any]:  # fmt: skip
    # The frequencies of LongRoPE are left out: they cost nothing, and weights are random.
    return dict(
        architectures=["Phi3ForCausalLM"], vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=1e-5,
        rope_theta=theta, max_position_embeddings=max_len, original_max_position_embeddings=max_len,
        tie_word_embeddings=False, dtype="bfloat16",
    ) | entries  # fmt: skip


def _gemma(
    generation: int, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int,
    window: int, max_len: int, **entries: Any,
) -> dict[str, Any]:  # fmt: skip
    return dict(
        architectures=[f"Gemma{generation}ForCausalLM"], vocab_size=vocab, hidden_size=hidden,
        intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-6, query_pre_attn_scalar=head_dim,
        sliding_window=window, max_position_embeddings=max_len, tie_word_embeddings=True, eos_token_id=[1, 106],
        dtype="bfloat16",
    ) | entries  # fmt: skip


_LINEAR_8 = {"rope_scaling": dict(rope_type="linear", factor=8.0)}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 128, 768),
    "llama2-7b": _llama(32000, 4096, 11008, 32, 32, 32, 1e4, 4096, dtype="float16"),
    "llama3-8b": _llama(128256, 4096, 14336, 32, 32, 8, 5e5, 8192),
    "llama3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, 5e5, 131072, scaling_factor=8.0),
    "llama3.2-1b": _llama(128256, 2048, 8192, 16, 32, 8, 5e5, 131072, tie_word_embeddings=True, scaling_factor=32.0),
    "llama3.2-3b": _llama(128256, 3072, 8192, 28, 24, 8, 5e5, 131072, tie_word_embeddings=True, scaling_factor=32.0),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, 1e5, 8192, tie_word_embeddings=True),
    "smollm2-360m": _llama(49152, 960, 2560, 32, 15, 5, 1e5, 8192, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(49152, 2048, 8192, 24, 32, 32, 1.3e5, 8192, tie_word_embeddings=True),
    "smollm3-3b": _llama(128256, 2048, 11008, 36, 16, 4, 5e6, 65536, tie_word_embeddings=True)
    | dict(architectures=["SmolLM3ForCausalLM"], rms_norm_eps=1e-6, no_rope_layer_interval=4),
    "qwen2.5-0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(151936, 2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4, tied=False),
    "qwen2.5-14b": _qwen2(152064, 5120, 13824, 48, 40, 8, tied=False),
    "qwen2.5-32b": _qwen2(152064, 5120, 27648, 64, 40, 8, tied=False),
    "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8, tied=False),
    "mistral-7b": _mistral(32768, 4096, 14336, 32, 1e6, 32768),
    "mistral-7b-v0.1": _mistral(32000, 4096, 14336, 32, 1e4, 32768, window=4096),
    "mistral-nemo-12b": _mistral(131072, 5120, 14336, 40, 1e6, 131072),
    "mistral-small-24b": _mistral(131072, 5120, 32768, 40, 1e8, 32768),
    "phi-3-mini": _phi(32064, 3072, 8192, 32, 32, 32, 1e4, 4096, sliding_window=2047),
    "phi-4-mini": _phi(
        200064, 3072, 8192, 32, 24, 8, 1e4, 131072, partial_rotary_factor=0.75, tie_word_embeddings=True
    ),
    "phi-4": _phi(100352, 5120, 17920, 40, 40, 10, 2.5e5, 16384),
    "gemma-2-2b": _gemma(2, 256000, 2304, 9216, 26, 8, 4, 256, 4096, 8192),
    "gemma-2-9b": _gemma(2, 256000, 3584, 14336, 42, 16, 8, 256, 4096, 8192),
    "gemma-2-27b": _gemma(2, 256000, 4608, 36864, 46, 32, 16, 128, 4096, 8192, query_pre_attn_scalar=144),
    "gemma-3-1b": _gemma(3, 262144, 1152, 6912, 26, 4, 1, 256, 512, 32768),
    "gemma-3-4b": _gemma(3, 262208, 2560, 10240, 34, 8, 4, 256, 1024, 131072, **_LINEAR_8),
    "gemma-3-12b": _gemma(3, 262208, 3840, 15360, 48, 16, 8, 256, 1024, 131072, **_LINEAR_8),
    "gemma-3-27b": _gemma(
        3, 262208, 5376, 21504, 62, 32, 16, 128, 1024, 131072, query_pre_attn_scalar=168, **_LINEAR_8
    ),
}


def preset(name: str) -> dict[str, Any]:
    """The config.json of a preset; a ValueError that lists the presets, nearest first, if the name is unknown."""
    key = name.lower()
    if key in PRESETS:
        return dict(PRESETS[key])
    near = difflib.get_close_matches(key, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no preset {name!r}{hint or '.'} Presets are {', '.join(PRESETS)}")
