"""A model's architecture, read from its config.json: frozen records, which everything downstream may keep a reference to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanovllm.config import DTYPES


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and, for context extension, how the frequencies are scaled."""

    theta: float = 10000.0
    scaling_type: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    """The scaling's own parameters, as (name, value) pairs of the checkpoint's config.json."""

    REQUIRED = MappingProxyType(
        {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
            "freq_factors": ("factors",),
        }
    )
    """The supported types of scaling, and the parameters that each needs."""


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
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str | None
    """The checkpoint's dtype, or None if it does not say."""
    eos_token_ids: tuple[int, ...]
    use_custom_kernels: bool | None
    raw: Mapping[str, Any]
    """The whole config.json, for what a single model needs beyond the fields above."""

    @property
    def num_queries_per_kv(self) -> int:
        return self.num_attention_heads // self.num_kv_heads

    @classmethod
    def from_dict(cls, c: Mapping[str, Any]) -> ModelConfig:
        """Parse a config.json; missing entries take the architecture's defaults in transformers.

        Raises:
            ValueError: an entry that is missing or has a value this engine does not support.
        """

        def get(name: str, default: Any = None) -> Any:
            value = c.get(name)
            value = default if value is None else value
            if value is None:
                raise ValueError(
                    f"config.json has no {name!r}; is it the configuration of a decoder-only language model?"
                )
            return value

        architectures = c.get("architectures") or []
        if len(architectures) != 1:
            raise ValueError(f"config.json: architectures={architectures!r}; exactly one is expected")
        qwen3 = architectures[0].startswith("Qwen3")
        heads = get("num_attention_heads")
        kv_heads = get("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        hidden_act = c.get("hidden_act", "silu")
        if hidden_act != "silu":
            raise ValueError(f"config.json: hidden_act={hidden_act!r} is not supported; only 'silu' is")
        if c.get("use_sliding_window"):
            raise ValueError(
                "config.json: use_sliding_window=true is not supported; set it to false for full attention"
            )
        for layer_type in c.get("layer_types") or ():
            if layer_type != "full_attention":
                raise ValueError(
                    f"config.json: layer_types has {layer_type!r}, which is not supported; only 'full_attention' is"
                )
        head_dim = get("head_dim", 128 if qwen3 else get("hidden_size") // heads)
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim={head_dim} is not supported; it must be even, for rotary embedding")
        use_custom_kernels = c.get("use_custom_kernels")
        if use_custom_kernels is not None and not isinstance(use_custom_kernels, bool):
            raise ValueError(f"config.json: use_custom_kernels={use_custom_kernels!r}: must be true or false")
        eos = c.get("eos_token_id")
        return cls(
            architecture=architectures[0],
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            intermediate_size=get("intermediate_size"),
            num_hidden_layers=get("num_hidden_layers"),
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            max_position_embeddings=get("max_position_embeddings", 32768 if qwen3 else 2048),
            rope=_rope(c),
            tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
            attention_bias=bool(c.get("attention_bias", False)),
            mlp_bias=bool(c.get("mlp_bias", False)),
            dtype=_dtype(c),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            use_custom_kernels=use_custom_kernels,
            raw=dict(c),
        )


def _dtype(c: Mapping[str, Any]) -> str | None:
    value = c.get("dtype") or c.get("torch_dtype")
    if value is None:
        return None
    value = str(value).removeprefix("torch.")
    if value not in DTYPES[1:]:
        raise ValueError(f"config.json: dtype={value!r} is not supported; pass dtype= one of {', '.join(DTYPES[1:])}")
    return value


def _rope(c: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; 4 wrote `rope_theta` and an optional `rope_scaling`.
    old, new = c.get("rope_scaling"), c.get("rope_parameters")
    rope = _rope_of(c, new or old or {})
    # Someone may have added the one that a model card tells of to a file that has the other.
    if old and new and _rope_of(c, old) != rope:
        raise ValueError(
            f"config.json: rope_scaling={old!r} and rope_parameters={new!r} contradict each other; remove one of them"
        )
    return rope


def _rope_of(c: Mapping[str, Any], entries: Mapping[str, Any]) -> RopeConfig:
    for name, value in entries.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"config.json: rope_parameters of their own for {name!r} are not supported; all layers must share them"
            )
    scaling = dict(entries)
    theta = scaling.pop("rope_theta", None) or c.get("rope_theta") or 10000.0
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in RopeConfig.REQUIRED:
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported; supported are {', '.join(RopeConfig.REQUIRED)}"
        )
    for partial in (scaling.pop("partial_rotary_factor", None), c.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor={partial!r} is not supported; only 1 is")
    if kind in ("yarn", "llama3"):
        # As in transformers, the one beside the block wins over the one in it.
        name = "original_max_position_embeddings"
        scaling[name] = c.get(name) or scaling.get(name) or c.get("max_position_embeddings")
    missing = [name for name in RopeConfig.REQUIRED[kind] if scaling.get(name) is None]
    if missing:
        raise ValueError(f"config.json: rope_type={kind!r} needs {', '.join(missing)} beside it")
    return RopeConfig(
        theta=float(theta),
        scaling_type=kind,
        scaling=tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items())),
    )
