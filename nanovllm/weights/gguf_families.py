"""What GGUF files of each architecture are called, hold and leave unsaid, as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Value = Callable[..., Any]
"""(key, default, kind): a number of the file, under its architecture's prefix; None: a key without default."""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _nothing(value: Value, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GGUFFamily:
    """Files of one `general.architecture`."""

    architecture: str
    """In a Hugging Face config.json."""
    layer_tensors: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_LAYER_TENSORS))
    """GGUF's name of a layer's tensor -> Hugging Face's name of its module."""
    permuted: bool = False
    """Whether rows of q and k are reordered, so that rotary pairs lie next to each other."""
    partial: bool = False
    """Whether `rope.dimension_count` may be less than the head."""
    rope_theta: float = 10000.0
    """Where the file has no `rope.freq_base`."""
    entries: Callable[[Value, Mapping[str, Any]], dict[str, Any]] = _nothing
    """(numbers of the file, entries so far) -> further entries of config.json."""


def _phi3(value: Value, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = value("rope.dimension_count", config["head_dim"])
    return {
        "sliding_window": value("attention.sliding_window", 0) or None,
        "partial_rotary_factor": rotated / config["head_dim"],
        "original_max_position_embeddings": value(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _gemma(value: Value, config: Mapping[str, Any], pattern: int, large: int) -> dict[str, Any]:
    """pattern: of this number of layers, one has full attention. large: layers of the model that scales queries by
    hidden_size / heads; files do not say it.
    """
    layers = config["num_hidden_layers"]
    scalar = config["hidden_size"] / config["num_attention_heads"] if layers == large else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": value("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
        ],
    }  # fmt: skip


def _gemma2(value: Value, config: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(value, config, 2, 46) | {
        "attn_logit_softcapping": value("attn_logit_softcapping", 50.0, float),
        "final_logit_softcapping": value("final_logit_softcapping", 30.0, float),
    }


def _gemma3(value: Value, config: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(value, config, value("attention.sliding_window_pattern", 6), 62) | {
        "rope_local_base_freq": value("rope.freq_base_swa", 10000.0, float),
        "final_logit_softcapping": value("final_logit_softcapping", 0.0, float) or None,
    }


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", permuted=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", _LAYER_TENSORS | _HEAD_NORMS),
    "smollm3": GGUFFamily(
        "SmolLM3ForCausalLM", permuted=True, entries=lambda value, config: {"no_rope_layer_interval": 4}
    ),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM", _LAYER_TENSORS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial=True, entries=_phi3,
    ),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", _LAYER_TENSORS | _NORMS_AFTER, entries=_gemma2),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM", _LAYER_TENSORS | _HEAD_NORMS | _NORMS_AFTER, rope_theta=1e6, entries=_gemma3
    ),
}  # fmt: skip
