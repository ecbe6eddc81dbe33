"""The calls that serving a model makes: ops with the shapes that matter for its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.kernels.op.inputs import Shape

BATCHES = (1, 8, 64, 256)
"""Sequences of a decode step."""
TOKENS = (2048, 8192)
"""Numbers of tokens of a prefill step."""
FEW = (1, 8, 32, 64, 128)
"""Tokens of a step whose products have a kernel of their own on Hopper."""


def shapes_of(config: Mapping[str, Any]) -> dict[str, Sequence[Shape]]:
    """op -> shapes as the op's inputs take them, in the order of importance of the ops, for a model's config.json."""
    hidden, inter, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    qkv, steps, few = (heads + 2 * kv_heads) * head_dim, (*BATCHES, *TOKENS), (1, 2, 4, 8)
    cache = heads, kv_heads, head_dim, 256  # tokens of a block of the KV cache, the default
    return {
        "attention_decode": [(n, length, length, *cache) for n in BATCHES for length in (512, 2048)],
        "qk_norm_rope_attention": [(n, length, length, *cache) for n in BATCHES for length in (512, 2048)],
        "attention_prefill": [(4, 512, 512, 0, *cache), (1, 4096, 4096, 0, *cache)],
        "add_rms_norm_linear": [(n, qkv, hidden) for n in few],
        "add_rms_norm_gate_up": [(n, inter, hidden) for n in few],
        "linear": [
            *((n, qkv, hidden) for n in FEW), *((n, hidden, size) for size in (heads * head_dim, inter) for n in few),
            (1, config["vocab_size"], hidden),
        ],
        "linear_silu_and_mul": [(n, inter, hidden) for n in FEW],
        "linear_add_rms_norm": [(n, hidden, size) for size in (heads * head_dim, inter) for n in FEW],
        "qk_norm_rope_store": [(n, heads, kv_heads, head_dim) for n in steps],
        "add_rms_norm": [(n, hidden) for n in steps],
        "silu_and_mul": [(n, inter) for n in steps],
        "rms_norm": [(n, hidden) for n in steps],
        "gated_mlp": [(n, hidden, inter) for n in (1, 16, 64, 256, 2048)],
        "linear_bias_act": [
            (n, k, outputs) for k, outputs in ((hidden, qkv), (inter, hidden)) for n in (1, 16, 64, 256, 2048)
        ],
        "embedding": [(n, config["vocab_size"], hidden) for n in (1, 256, 8192)],
    }  # fmt: skip
