"""A model's architecture, read from its config.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from nanovllm.config import DTYPES

_MAX_COUNT = 2**31 - 1
"""A larger count is a damaged file."""


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
        if self.scaling_type != "yarn":
            return 0
        scaling = dict(self.scaling)
        return int(min(scaling["factor"] * scaling["original_max_position_embeddings"], _MAX_COUNT))


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

        entries = _Entries(c)
        architectures = c.get("architectures") or []
        if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
            raise ValueError(f"config.json: architectures={_short(architectures)}; exactly one is expected")
        qwen3 = architectures[0].startswith("Qwen3")
        count, flag = entries.count, entries.flag
        heads = count("num_attention_heads")
        # null is one for each head; transformers' Qwen3Config has a number of its own for an entry that is not there.
        kv_heads = count("num_key_value_heads", 32 if qwen3 and "num_key_value_heads" not in c else heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = count("head_dim", 128 if qwen3 else count("hidden_size") // heads)
        if head_dim % 2:
            _fail("head_dim", head_dim, " is not supported; it must be even, for rotary embedding")
        eps = entries.get("rms_norm_eps", 1e-6)
        if not _is_number(eps) or eps < 0:
            _fail("rms_norm_eps", eps, ": must be a number, at least 0")
        _refuse_unsupported(c, entries.optional_flag("use_sliding_window"))
        rope = _rope(c)
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
            eos_token_ids=_end_tokens(c.get("eos_token_id")),
            use_custom_kernels=entries.optional_flag("use_custom_kernels"),
            raw=dict(c),
        )


class _Entries:
    """The entries of a config.json, checked as they are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"config.json has no {name!r}; is it the configuration of a decoder-only language model?")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
            _fail(name, value, f": must be a positive integer, at most {_MAX_COUNT}")
        return value

    def optional_flag(self, name: str) -> bool | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            _fail(name, value, ": must be true or false")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.optional_flag(name))


def _fail(name: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"config.json: {name}={_short(value)}{remedy}")


def _end_tokens(eos: Any) -> tuple[int, ...]:
    tokens = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        _fail("eos_token_id", eos, ": must be a token id or a list of them")
    return tokens


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
    hidden_act, layer_types = c.get("hidden_act", "silu"), c.get("layer_types")
    if hidden_act != "silu":
        _fail("hidden_act", hidden_act, " is not supported; only 'silu' is")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        _fail("layer_types", layer_types, ": only a list of 'full_attention' is supported")
    if not layer_types:
        _refuse_window(c, use_sliding_window)
    if quantization := c.get("quantization_config"):
        remedy = "take the model's checkpoint in bfloat16 or float16, or a GGUF file"
        _fail("quantization_config", quantization, f" is not supported; {remedy}")


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
        _fail("sliding_window", window, " is not supported; set it to null for full attention")


def _dtype(c: Mapping[str, Any]) -> str | None:
    value = c.get("dtype") or c.get("torch_dtype")
    if value is None:
        return None
    value = str(value).removeprefix("torch.")
    if value not in DTYPES[1:]:
        _fail("dtype", value, f" is not supported; pass dtype= one of {', '.join(DTYPES[1:])}")
    return value


def _rope(c: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; 4 wrote `rope_theta` and an optional `rope_scaling`.
    old, new = c.get("rope_scaling"), c.get("rope_parameters")
    rope = _rope_of(c, "rope_parameters" if new else "rope_scaling")
    # A user may have added the block that a model card names to a file that has the other one.
    if old and new and _rope_of(c, "rope_scaling") != rope:
        raise ValueError(
            f"config.json: rope_scaling={_short(old)} and rope_parameters={_short(new)} contradict each other; remove"
            " one of them"
        )
    return rope


def _rope_of(c: Mapping[str, Any], block: str) -> RopeConfig:
    entries = c.get(block) or {}
    if not isinstance(entries, Mapping):
        _fail(block, entries, ": must be an object, or null")
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
        _fail("rope_type", kind, f" is not supported; supported are {', '.join(RopeConfig.REQUIRED)}")
    for partial in (scaling.pop("partial_rotary_factor", None), c.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            _fail("partial_rotary_factor", partial, " is not supported; only 1 is")
    if kind in ("yarn", "llama3"):
        # As in transformers, the entry beside the block wins over the entry in it.
        name = "original_max_position_embeddings"
        found = (c.get(name), scaling.get(name), c.get("max_position_embeddings"))
        scaling[name] = next((length for length in found if length is not None), None)
    missing = [name for name in RopeConfig.REQUIRED[kind] if scaling.get(name) is None]
    if missing:
        _fail("rope_type", kind, f" needs {', '.join(missing)} beside it")
    _check_numbers(kind, {"rope_theta": theta} | scaling)
    return RopeConfig(
        theta=float(theta),
        scaling_type=kind,
        scaling=tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items())),
    )


def _check_numbers(kind: str, rope: Mapping[str, Any]) -> None:
    for name in ("rope_theta", *(name for name in RopeConfig.REQUIRED[kind] if name != "factors")):
        if not _is_number(rope[name]) or rope[name] <= 0:
            _fail(name, rope[name], ": must be a number above 0")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        high = _short(rope["high_freq_factor"])
        _fail("low_freq_factor", rope["low_freq_factor"], f" must be below high_freq_factor={high}")
    if kind == "yarn":
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if rope.get(name) is not None and (not _is_number(rope[name]) or rope[name] < 0):
                _fail(name, rope[name], ": must be a number, at least 0")
