"""A model's architecture, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.config import DTYPES
from nanovllm.model_config.entries import Entries, fail, is_number
from nanovllm.model_config.families import Family, MoeConfig, family_of, read_moe, rotated_layers, sparse_layers
from nanovllm.model_config.rope import RopeConfig, check_head, read_rope, read_two_ropes
from nanovllm.wording import brief

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Name in a config.json -> name in `ModelConfig.activation`."""


MAX_LAYERS = 10_000
"""A larger number is a damaged file: each layer has a record."""


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between the layers of a model."""

    window: int | None = None
    """A token attends to the last `window` tokens up to itself; None: to all tokens up to itself."""
    rope: int | None = 0
    """Which of `ModelConfig.ropes` rotates queries and keys; None: they are not rotated."""
    sparse: bool = False
    """Whether it has the experts of `ModelConfig.moe` in place of one MLP."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder-only model, read from a Hugging Face style config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """The longest sequence: config.json's entry, or what YaRN extends it to if that is more."""
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the projections of queries, keys and values have a bias."""
    attention_output_bias: bool
    mlp_bias: bool
    activation: str
    """The activation of the MLP: "silu", "gelu" or "gelu_tanh"."""
    attention_scale: float
    """Multiplies q @ k."""
    attention_soft_cap: float | None
    """If given, an attention score s becomes soft_cap * tanh(s / soft_cap)."""
    logit_soft_cap: float | None
    """The same, of logits."""
    embedding_scale: float
    """Multiplies embeddings."""
    dtype: str | None
    """The checkpoint's dtype, or None if it does not say."""
    eos_token_ids: tuple[int, ...]
    use_custom_kernels: bool | None
    moe: MoeConfig | None
    """The experts of layers that have some; None: no layer has."""
    raw: Mapping[str, Any]
    """The whole config.json, for what a single model needs beyond the fields above."""

    @property
    def rope(self) -> RopeConfig:
        """The rotation of layers with full attention."""
        return self.ropes[0]

    @classmethod
    def from_dict(cls, c: Mapping[str, Any]) -> ModelConfig:
        """Parse a config.json; missing entries take the architecture's defaults in transformers.

        Raises:
            ValueError: an entry that is missing or has a value this engine does not support.
        """
        entries = Entries(c)
        architecture = _architecture(c)
        family = family_of(architecture)
        count, flag = entries.count, entries.flag
        heads = count("num_attention_heads")
        # null is one for each head; some of transformers' configurations have another number for a missing entry.
        missing = "num_key_value_heads" not in c
        kv_heads = count("num_key_value_heads", family.num_kv_heads if missing and family.num_kv_heads else heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = count("head_dim", family.head_dim or count("hidden_size") // heads)
        if head_dim % 2:
            fail("head_dim", head_dim, " is not supported; it must be even, for rotary embedding")
        eps = entries.get("rms_norm_eps", family.rms_norm_eps)
        if not is_number(eps) or eps < 0:
            fail("rms_norm_eps", eps, ": must be a number, at least 0")
        ropes = _ropes(c, family, head_dim)
        num_layers = count("num_hidden_layers")
        if num_layers > MAX_LAYERS:
            fail("num_hidden_layers", num_layers, f": must be at most {MAX_LAYERS}")
        bias = flag("attention_bias") and family.attention_bias
        return cls(
            architecture=architecture,
            vocab_size=count("vocab_size"),
            hidden_size=count("hidden_size"),
            intermediate_size=count("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(eps),
            max_position_embeddings=max(
                count("max_position_embeddings", family.max_position_embeddings), ropes[0].reach
            ),
            ropes=ropes,
            layers=_layers(entries, family, architecture, num_layers),
            tie_word_embeddings=flag("tie_word_embeddings", family.tied),
            attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=bias,
            mlp_bias=flag("mlp_bias") and family.mlp_bias,
            activation=entries.one_of(family.activation_entry, family.activation, ACTIVATIONS),
            dtype=_dtype(c),
            eos_token_ids=_end_tokens(c.get("eos_token_id")),
            use_custom_kernels=entries.optional_flag("use_custom_kernels"),
            moe=read_moe(entries) if family.moe else None,
            raw=dict(c),
            **_scales(entries, family, head_dim),
        )


def _architecture(c: Mapping[str, Any]) -> str:
    architectures = c.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise ValueError(f"config.json: architectures={brief(architectures)}; exactly one is expected")
    if isinstance(c.get("text_config"), Mapping):
        fail("architectures", architectures, " has a text_config beside other parts; only models of text are supported")
    return architectures[0]


def _ropes(c: Mapping[str, Any], family: Family, head_dim: int) -> tuple[RopeConfig, ...]:
    if family.local_rope_theta is None:
        ropes: tuple[RopeConfig, ...] = (read_rope(c, family.rope),)
    else:
        ropes = read_two_ropes(c, family.rope, family.local_rope_theta)
    for rope in ropes:
        check_head(rope, head_dim)
    return ropes


def _layers(entries: Entries, family: Family, architecture: str, num_layers: int) -> tuple[LayerConfig, ...]:
    """The layers; one record stands for all layers that are alike."""
    windows = family.windows(entries, num_layers)
    if family.moe:
        return tuple(
            LayerConfig(*layer) for layer in zip(windows, [0] * num_layers, sparse_layers(entries, num_layers))
        )
    if family.local_rope_theta is not None:
        return tuple(LayerConfig(window, 0 if window is None else 1) for window in windows)
    if architecture.startswith("SmolLM3"):
        rotated = rotated_layers(entries, num_layers)
        return tuple(LayerConfig(window, 0 if yes else None) for window, yes in zip(windows, rotated))
    return tuple(map(LayerConfig, windows))


def _scales(entries: Entries, family: Family, head_dim: int) -> dict[str, Any]:
    if entries.flag("use_bidirectional_attention"):
        fail("use_bidirectional_attention", True, " is not supported; the model is no causal language model")
    if not family.gemma:
        return dict(
            attention_scale=head_dim**-0.5, attention_soft_cap=None, logit_soft_cap=None, embedding_scale=1.0
        )  # fmt: skip
    scalar = entries.optional_number("query_pre_attn_scalar", 256.0)
    if scalar is None:
        fail("query_pre_attn_scalar", None, ": must be a number above 0")
    scores, logits = family.soft_caps
    score_cap = entries.optional_number("attn_logit_softcapping", scores)
    if score_cap is not None and scores is None:  # transformers has this entry of Gemma 3, and does not apply it
        fail("attn_logit_softcapping", score_cap, " is not supported for this architecture; set it to null")
    return dict(
        attention_scale=scalar**-0.5,
        attention_soft_cap=score_cap,
        logit_soft_cap=entries.optional_number("final_logit_softcapping", logits),
        embedding_scale=entries.count("hidden_size") ** 0.5,
    )


def _end_tokens(eos: Any) -> tuple[int, ...]:
    tokens = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        fail("eos_token_id", eos, ": must be a token id or a list of them")
    return tokens


def _dtype(c: Mapping[str, Any]) -> str | None:
    value = c.get("dtype") or c.get("torch_dtype")
    if value is None:
        return None
    value = str(value).removeprefix("torch.")
    if value not in DTYPES[1:]:
        fail("dtype", value, f" is not supported; pass dtype= one of {', '.join(DTYPES[1:])}")
    return value
