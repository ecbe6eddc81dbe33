"""Rotary position embedding as a config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from nanovllm.model_config.entries import MAX_COUNT, fail, is_number
from nanovllm.wording import brief


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and, for context extension, how the frequencies are scaled."""

    theta: float = 10000.0
    scaling_type: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    """The scaling's own parameters, as (name, value) pairs of the checkpoint's config.json."""
    rotary_factor: float = 1.0
    """The share of each head that is rotated, its leading elements; the rest passes unchanged."""

    REQUIRED = MappingProxyType(
        {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
            "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
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
        return int(min(scaling["factor"] * scaling["original_max_position_embeddings"], MAX_COUNT))

    def is_long(self, max_position: int) -> bool:
        """Whether LongRoPE's frequencies for long contexts are taken if positions below `max_position` are served."""
        return self.scaling_type == "longrope" and max_position > self.original_length

    @property
    def original_length(self) -> int:
        """The context of the original training, for types that say it; else 0."""
        return int(dict(self.scaling).get("original_max_position_embeddings", 0))

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated."""
        return int(head_dim * self.rotary_factor)


LISTS = ("factors", "short_factor", "long_factor")
"""Parameters that have one number for each frequency."""


@dataclass(frozen=True)
class RopeDefaults:
    """What an architecture's configuration in transformers assumes, or accepts."""

    theta: float = 10000.0
    original_length: int | None = None
    """Stands for an original_max_position_embeddings that is missing; None: max_position_embeddings."""
    types: Sequence[str] = tuple(RopeConfig.REQUIRED)
    renamed: tuple[tuple[str, str], ...] = ()
    """(old name, name) of types of scaling."""
    partial: bool = False
    """Whether a part of each head may be rotated alone."""


def read_rope(c: Mapping[str, Any], defaults: RopeDefaults) -> RopeConfig:
    """The rotation that all layers of a model share.

    transformers 5 writes one `rope_parameters`; 4 wrote `rope_theta` and an optional `rope_scaling`.

    Raises:
        ValueError: a value that is not supported, or two blocks that contradict each other.
    """
    old, new = c.get("rope_scaling"), c.get("rope_parameters")
    rope = _rope_of(c, "rope_parameters" if new else "rope_scaling", defaults)
    # A user may have added the block that a model card names to a file that has the other one.
    if old and new and _rope_of(c, "rope_scaling", defaults) != rope:
        _contradict(old, new)
    return rope


def _contradict(old: Any, new: Any) -> NoReturn:
    raise ValueError(
        f"config.json: rope_scaling={brief(old)} and rope_parameters={brief(new)} contradict each other; remove one of"
        " them"
    )


def read_two_ropes(c: Mapping[str, Any], defaults: RopeDefaults, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers with full attention, and of layers with a window, as Gemma 3 has them.

    transformers 5 writes `rope_parameters` with an object for each kind of layer; 4 wrote `rope_theta`,
    `rope_local_base_freq`, and a `rope_scaling` for full attention alone.

    Raises:
        ValueError: as `read_rope`.
    """
    blocks = c.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(blocks, Mapping) or any(name not in kinds for name in blocks):
        fail("rope_parameters", blocks, f": must be an object with {' and '.join(map(repr, kinds))}, or null")
    full, local = ({} if blocks.get(name) is None else blocks[name] for name in kinds)
    rest = {name: value for name, value in c.items() if name not in ("rope_parameters", "rope_scaling", "rope_theta")}
    scaling = c.get("rope_scaling")
    if scaling and full:
        one, other = (_rope_of(rest | {"rope_scaling": block}, "rope_scaling", defaults) for block in (scaling, full))
        if one != other:
            _contradict(scaling, full)
    if any((block or {}).get("truncate") is False for block in (full, local, scaling) if isinstance(block, Mapping)):
        # transformers has this entry of a YaRN block, and does not apply it where there are two.
        fail("truncate", False, " is not supported where layers have rotations of their own; remove it")
    of_full = rest | {"rope_parameters": full or scaling, "rope_theta": c.get("rope_theta")}
    of_local = rest | {"rope_parameters": local, "rope_theta": c.get("rope_local_base_freq", local_theta)}
    return _rope_of(of_full, "rope_parameters", defaults), _rope_of(of_local, "rope_parameters", defaults)


def _rope_of(c: Mapping[str, Any], block: str, defaults: RopeDefaults) -> RopeConfig:
    entries = c.get(block) or {}
    if not isinstance(entries, Mapping):
        fail(block, entries, ": must be an object, or null")
    for name, value in entries.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"config.json: {block} of its own for {name!r} is not supported; all layers must share one"
            )
    scaling = dict(entries)
    theta = next((t for t in (scaling.pop("rope_theta", None), c.get("rope_theta")) if t is not None), defaults.theta)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    kind = dict(defaults.renamed).get(kind, kind) if isinstance(kind, str) else kind
    if kind not in tuple(defaults.types):
        fail("rope_type", kind, f" is not supported; supported are {', '.join(defaults.types)}")
    partial = _rotary_factor(scaling.pop("partial_rotary_factor", None), c, defaults)
    _fill_lengths(kind, scaling, c, defaults)
    missing = [name for name in RopeConfig.REQUIRED[kind] if scaling.get(name) is None]
    if missing:
        fail("rope_type", kind, f" needs {', '.join(missing)} beside it")
    _check_numbers(kind, {"rope_theta": theta} | scaling)
    return RopeConfig(
        theta=float(theta),
        scaling_type=kind,
        scaling=tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items())),
        rotary_factor=partial,
    )


def _rotary_factor(inside: Any, c: Mapping[str, Any], defaults: RopeDefaults) -> float:
    """The factor in the block, or the one beside it."""
    beside = c.get("partial_rotary_factor")
    for value in (inside, beside):
        if not defaults.partial and value not in (None, 1, 1.0):
            fail("partial_rotary_factor", value, " is not supported; only 1 is")
        if value is not None and (not is_number(value) or not 0 < value <= 1):
            fail("partial_rotary_factor", value, ": must be a number above 0, at most 1")
    return float(next((value for value in (inside, beside) if value is not None), 1.0))


def _fill_lengths(kind: str, scaling: dict[str, Any], c: Mapping[str, Any], defaults: RopeDefaults) -> None:
    """Resolve what a scaling takes from the entries beside it."""
    if kind not in ("yarn", "llama3", "longrope"):
        return
    # As in transformers, the entry beside the block wins over the entry in it.
    name, longest = "original_max_position_embeddings", c.get("max_position_embeddings")
    found = (c.get(name), defaults.original_length, scaling.get(name), longest)
    scaling[name] = next((length for length in found if length is not None), None)
    if kind == "longrope" and scaling.get("factor") is None and is_number(scaling[name]) and is_number(longest):
        scaling["factor"] = longest / scaling[name] if scaling[name] else None


def _check_numbers(kind: str, rope: Mapping[str, Any]) -> None:
    for name in ("rope_theta", *(name for name in RopeConfig.REQUIRED[kind] if name not in LISTS)):
        if not is_number(rope[name]) or rope[name] <= 0:
            fail(name, rope[name], ": must be a number above 0")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        high = brief(rope["high_freq_factor"])
        fail("low_freq_factor", rope["low_freq_factor"], f" must be below high_freq_factor={high}")
    optional = {
        "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        "longrope": ("attention_factor", "factor"),
    }
    for name in optional.get(kind, ()):
        if rope.get(name) is not None and (not is_number(rope[name]) or rope[name] < 0):
            fail(name, rope[name], ": must be a number, at least 0")
    if kind == "longrope":
        if rope["original_max_position_embeddings"] <= 1:
            name = "original_max_position_embeddings"
            fail(name, rope[name], ": must be above 1")
        for name in ("short_factor", "long_factor"):
            factors = rope[name]
            if not isinstance(factors, (list, tuple)) or not all(is_number(f) and f > 0 for f in factors):
                fail(name, factors, ": must be a list of numbers above 0")


def check_head(rope: RopeConfig, head_dim: int) -> None:
    """Raise a ValueError if a rotation does not fit the heads."""
    rotated = rope.rotary_dim(head_dim)
    if rotated % 2 or not rotated:
        remedy = f" rotates {rotated} of the {head_dim} elements of a head; it must be an even number above 0"
        fail("partial_rotary_factor", rope.rotary_factor, remedy)
    for name, factors in rope.scaling:
        if name in ("short_factor", "long_factor") and rope.scaling_type == "longrope" and len(factors) != rotated // 2:
            remedy = f": must be a list of {rotated // 2} numbers, one for each frequency, not of {len(factors)}"
            fail(name, list(factors), remedy)
