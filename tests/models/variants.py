"""Tiny models, one for each peculiarity of an architecture: (architecture of `tiny`, entries of its configuration).

Windows are shorter than the prompts, and differ from the block size.
"""

from typing import Any

_LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=1e6)
_LONG: dict[str, Any] = dict(
    rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
)  # fmt: skip
_PHI = dict(hidden_size=64, max_position_embeddings=512)
LONG_FROM = 24
"""The context of training of the variant "phi3-long": longer sequences have other frequencies."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen2-windows": (
        "qwen2", dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3-windows": (
        "qwen3",
        dict(use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    ),
    "experts": (
        "qwen3_moe", dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "experts-some-layers": (
        "qwen3_moe",
        dict(num_hidden_layers=3, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40, mlp_only_layers=[1],
             use_sliding_window=True, sliding_window=9),
    ),
    "experts-every-second-layer": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=16, decoder_sparse_step=2),
    ),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral-window": ("mistral", dict(sliding_window=7, num_attention_heads=6, num_key_value_heads=2)),
    "smollm3": ("smollm3", dict(num_hidden_layers=3, no_rope_layer_interval=2, tie_word_embeddings=True)),
    "smollm3-windows": (
        "smollm3",
        dict(num_hidden_layers=3, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=11,
             attention_bias=True, mlp_bias=True),
    ),
    "phi3-window": ("phi3", _PHI | dict(sliding_window=9)),
    "phi3-partial": ("phi3", _PHI | dict(partial_rotary_factor=0.5, num_key_value_heads=1)),
    "phi3-short": ("phi3", _PHI | dict(rope_parameters=_LONG, original_max_position_embeddings=128)),
    "phi3-long": ("phi3", _PHI | dict(rope_parameters=_LONG, original_max_position_embeddings=LONG_FROM)),
    "gemma2": (
        "gemma2",
        dict(sliding_window=9, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    ),
    "gemma3": (
        "gemma3",
        dict(num_hidden_layers=3, sliding_window=9, query_pre_attn_scalar=24, tie_word_embeddings=True,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"],
             rope_parameters=dict(full_attention=_LINEAR, sliding_attention=dict(rope_type="default", rope_theta=1e3))),
    ),
}  # fmt: skip
