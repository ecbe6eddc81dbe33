"""A model's architecture, read from its config.json: frozen records, which everything downstream may keep a reference
to.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanovllm.config import DTYPES

_MAX_COUNT = 2**31 - 1
"""The largest count that is believed: a larger one is a damaged file, and would be met as a failed allocation."""


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

    @property
    def reach(self) -> int:
        """Positions that YaRN extends a context to; 0 for other types, which do not say from where."""
        scaling = dict(self.scaling)
        return (
            int(min(scaling["factor"] * scaling["original_max_position_embeddings"], _MAX_COUNT))
            if self.scaling_type == "yarn"
            else 0
        )


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
    """The longest sequence: config.json's entry, or what YaRN extends it to, if a rope block was added without raising
    that.
    """
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

        def count(name: str, default: int | None = None) -> int:
            value = get(name, default)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
                raise ValueError(
                    f"config.json: {name}={_short(value)}: must be a positive integer, at most {_MAX_COUNT}"
                )
            return value

        def optional_flag(name: str) -> bool | None:
            value = c.get(name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"config.json: {name}={_short(value)}: must be true or false")
            return value

        def flag(name: str) -> bool:
            return bool(optional_flag(name))

        architectures = c.get("architectures") or []
        if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
            raise ValueError(f"config.json: architectures={_short(architectures)}; exactly one is expected")
        qwen3 = architectures[0].startswith("Qwen3")
        heads = count("num_attention_heads")
        # null is one for each head; transformers' Qwen3Config has a number of its own for an entry that is not there.
        kv_heads = count("num_key_value_heads", 32 if qwen3 and "num_key_value_heads" not in c else heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = count("head_dim", 128 if qwen3 else count("hidden_size") // heads)
        if head_dim % 2:
            raise ValueError(
                f"config.json: head_dim={head_dim} is not supported; it must be even, for rotary embedding"
            )
        eps = get("rms_norm_eps", 1e-6)
        if not _is_number(eps) or eps < 0:
            raise ValueError(f"config.json: rms_norm_eps={_short(eps)}: must be a number, at least 0")
        _refuse_unsupported(c, optional_flag("use_sliding_window"))
        rope = _rope(c)
        eos = c.get("eos_token_id")
        eos = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in eos):
            raise ValueError(
                f"config.json: eos_token_id={_short(c['eos_token_id'])}: must be a token id or a list of them"
            )
        return cls(
            architecture=architectures[0],
            vocab_size=count("vocab_size"),
            hidden_size=count("hidden_size"),
            intermediate_size=count("intermediate_size"),
            num_hidden_layers=count("num_hidden_layers"),
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(eps),
            max_position_embeddings=max(count("max_position_embeddings", 32768 if qwen3 else 2048), rope.reach),
            rope=rope,
            tie_word_embeddings=flag("tie_word_embeddings"),
            attention_bias=flag("attention_bias"),
            mlp_bias=flag("mlp_bias") and not qwen3,  # Qwen3 has no such entry: transformers passes it over
            dtype=_dtype(c),
            eos_token_ids=eos,
            use_custom_kernels=optional_flag("use_custom_kernels"),
            raw=dict(c),
        )


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be beyond any float; NaN is not <= anything


def _short(value: Any) -> str:
    """The value for a message, which an integer of thousands of digits would fill."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _refuse_unsupported(c: Mapping[str, Any], use_sliding_window: bool | None) -> None:
    """What would make another model of the same weights."""
    hidden_act = c.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ValueError(f"config.json: hidden_act={_short(hidden_act)} is not supported; only 'silu' is")
    layer_types = c.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise ValueError(
            f"config.json: layer_types={_short(layer_types)}: only a list of 'full_attention' is supported"
        )
    if not layer_types:
        _refuse_window(c, use_sliding_window)
    quantization = c.get("quantization_config")
    if quantization:
        raise ValueError(
            f"config.json: quantization_config={_short(quantization)} is not supported; take the model's checkpoint in"
            " bfloat16 or float16, or a GGUF file"
        )


def _refuse_window(c: Mapping[str, Any], use_sliding_window: bool | None) -> None:
    """A sliding window, where no layer_types say which layers have one."""
    if not c["architectures"][0].startswith("Llama"):
        if use_sliding_window:
            raise ValueError(
                "config.json: use_sliding_window=true is not supported; set it to false for full attention"
            )
        return
    window = c.get("sliding_window")
    # transformers' Llama reads neither entry. But its cache reads the window, and `generate` then differs from one
    # forward of the same tokens; "use_sliding_window": false says which of the two is meant.
    if window is not None and use_sliding_window is not False:
        raise ValueError(
            f"config.json: sliding_window={_short(window)} is not supported; set it to null for full attention"
        )


def _dtype(c: Mapping[str, Any]) -> str | None:
    value = c.get("dtype") or c.get("torch_dtype")
    if value is None:
        return None
    value = str(value).removeprefix("torch.")
    if value not in DTYPES[1:]:
        raise ValueError(
            f"config.json: dtype={_short(value)} is not supported; pass dtype= one of {', '.join(DTYPES[1:])}"
        )
    return value


def _rope(c: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; 4 wrote `rope_theta` and an optional `rope_scaling`.
    old, new = c.get("rope_scaling"), c.get("rope_parameters")
    rope = _rope_of(c, "rope_parameters" if new else "rope_scaling")
    # Someone may have added the one that a model card tells of to a file that has the other.
    if old and new and _rope_of(c, "rope_scaling") != rope:
        raise ValueError(
            f"config.json: rope_scaling={_short(old)} and rope_parameters={_short(new)} contradict each other; remove"
            f" one of them"
        )
    return rope


def _rope_of(c: Mapping[str, Any], block: str) -> RopeConfig:
    entries = c.get(block) or {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"config.json: {block}={_short(entries)}: must be an object, or null")
    for name, value in entries.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"config.json: {block} of its own for {name!r} is not supported; all layers must share one"
            )
    scaling = dict(entries)
    theta = next((t for t in (scaling.pop("rope_theta", None), c.get("rope_theta")) if t is not None), 10000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in tuple(RopeConfig.REQUIRED):
        raise ValueError(
            f"config.json: rope_type={_short(kind)} is not supported; supported are {', '.join(RopeConfig.REQUIRED)}"
        )
    for partial in (scaling.pop("partial_rotary_factor", None), c.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor={_short(partial)} is not supported; only 1 is")
    if kind in ("yarn", "llama3"):
        # As in transformers, the one beside the block wins over the one in it.
        name = "original_max_position_embeddings"
        found = (c.get(name), scaling.get(name), c.get("max_position_embeddings"))
        scaling[name] = next((length for length in found if length is not None), None)
    missing = [name for name in RopeConfig.REQUIRED[kind] if scaling.get(name) is None]
    if missing:
        raise ValueError(f"config.json: rope_type={_short(kind)} needs {', '.join(missing)} beside it")
    _check_numbers(kind, {"rope_theta": theta} | scaling)
    return RopeConfig(
        theta=float(theta),
        scaling_type=kind,
        scaling=tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items())),
    )


def _check_numbers(kind: str, rope: Mapping[str, Any]) -> None:
    needed = ("rope_theta", *(name for name in RopeConfig.REQUIRED[kind] if name != "factors"))
    for name in needed:
        if not _is_number(rope[name]) or rope[name] <= 0:
            raise ValueError(f"config.json: {name}={_short(rope[name])}: must be a number above 0")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(
            f"config.json: low_freq_factor={_short(rope['low_freq_factor'])} must be below"
            f" high_freq_factor={_short(rope['high_freq_factor'])}"
        )
    if kind == "yarn":
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if rope.get(name) is not None and (not _is_number(rope[name]) or rope[name] < 0):
                raise ValueError(f"config.json: {name}={_short(rope[name])}: must be a number, at least 0")
