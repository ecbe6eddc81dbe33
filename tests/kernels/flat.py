"""Attention ops as functions of the fields of their records, so that a test can change one at a time: `k_cache` in
place of `kv`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanovllm.kernels import all_ops

ATTENTION = (
    "attention_decode",
    "attention_decode_shared",
    "attention_prefill",
    "qk_norm_rope_attention",
    "qk_norm_rope_attention_shared",
)


def flat(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A provider's function, or a wrapper of it with further keyword arguments, that takes the fields of the op's
    records.
    """
    return all_ops()[op].records.taking_fields(function)


class Flat:
    """All attention ops of one provider."""

    def __init__(self, provider: str) -> None:
        for name in ATTENTION:
            if provider in all_ops()[name].providers:
                setattr(self, name, flat(name, all_ops()[name].providers[provider].fn))


NATIVE = Flat("native")
