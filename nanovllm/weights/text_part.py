"""The model of text in a checkpoint that reads images too: its configuration, and which tensors are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanovllm.wording import brief


@dataclass(frozen=True)
class _Whole:
    """An architecture that has a model of text beside a model of images.

    Attributes:
        text: the architecture of the model of text.
        model_type: what its `text_config` must say, if it says something.
        defaults: entries that a `text_config` may leave out, and a config.json of the model of text may not.
    """

    text: str
    model_type: str
    defaults: Mapping[str, Any]


_WHOLES: Mapping[str, _Whole] = {
    "Gemma3ForConditionalGeneration": _Whole(
        "Gemma3ForCausalLM", "gemma3_text",
        MappingProxyType(dict(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        )),
    ),
    "Mistral3ForConditionalGeneration": _Whole(
        "MistralForCausalLM", "mistral",
        MappingProxyType(dict(
            vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        )),
    ),
}  # fmt: skip

_OUTER = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "use_custom_kernels")
"""Entries that stand beside `text_config` in some files, and inside it in others."""

_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
"""(what names of a text model's tensors begin with, what stands for it in a model of text alone). transformers 5 writes
the second."""
_OTHERS = ("vision_tower.", "multi_modal_projector.")


def text_entries(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the model of text; None: the checkpoint is no such one.

    Raises:
        ValueError: its model of text is of another kind than the architecture's.
    """
    names: Any = config.get("architectures")
    one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    whole, inner = _WHOLES.get(names[0]) if one else None, config.get("text_config")
    if whole is None or not isinstance(inner, Mapping):
        return None
    kind = inner.get("model_type", whole.model_type)
    if kind != whole.model_type:
        raise ValueError(
            f"config.json: text_config.model_type={brief(kind, 60)} is not supported for {names[0]}; only"
            f" {whole.model_type!r} is"
        )
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    return {**whole.defaults, **inner, **outer, "architectures": [whole.text]}


def text_tensor(name: str) -> str | None:
    """The name of a checkpoint's tensor in the model of text; None: it belongs to another part."""
    if name.removeprefix("model.").startswith(_OTHERS):
        return None
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name[len(prefix) :]
    return name
