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


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "llama2-7b": _llama(32000, 4096, 11008, 32, 32, 32, 1e4, 4096, dtype="float16"),
    "llama3-8b": _llama(128256, 4096, 14336, 32, 32, 8, 5e5, 8192),
    "llama3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, 5e5, 131072, scaling_factor=8.0),
    "llama3.2-1b": _llama(128256, 2048, 8192, 16, 32, 8, 5e5, 131072, tie_word_embeddings=True, scaling_factor=32.0),
    "llama3.2-3b": _llama(128256, 3072, 8192, 28, 24, 8, 5e5, 131072, tie_word_embeddings=True, scaling_factor=32.0),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, 1e5, 8192, tie_word_embeddings=True),
    "smollm2-360m": _llama(49152, 960, 2560, 32, 15, 5, 1e5, 8192, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(49152, 2048, 8192, 24, 32, 32, 1.3e5, 8192, tie_word_embeddings=True),
}


def preset(name: str) -> dict[str, Any]:
    """The config.json of a preset; a ValueError that lists the presets, nearest first, if the name is unknown."""
    key = name.lower()
    if key in PRESETS:
        return dict(PRESETS[key])
    near = difflib.get_close_matches(key, PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no preset {name!r}{hint or '.'} Presets are {', '.join(PRESETS)}")
