"""How each module of a checkpoint is stored: rules over the names of modules. The first rule that matches decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from nanovllm.weights.quantization.storage import Storage
from nanovllm.wording import brief

REMEDY = (
    "take the model in bfloat16, FP8, AWQ, GPTQ or compressed-tensors, or as a GGUF file; a bfloat16 model can be"
    ' quantised while it is loaded, with quantization="fp8" or "int4"'
)


@dataclass(frozen=True)
class Rule:
    """storage: of the modules that a pattern matches; None: they are not quantised.

    A pattern is the name of a module, of one around it, or the last parts of a name ("lm_head", "mlp.gate"). With "re:"
    before it, it is a regular expression that matches from a name's start.
    """

    patterns: tuple[str, ...]
    storage: Storage | None

    def matches(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.patterns)


EVERY = ("re:",)
"""Patterns that match every module."""


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern)


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's configuration says about quantisation.

    Attributes:
        method: as the configuration names it: "fp8", "awq", "gptq" or "compressed-tensors".
    """

    method: str
    rules: tuple[Rule, ...]

    def storage_of(self, module: str) -> Storage | None:
        """How the matrix of a module such as "model.layers.0.mlp.up_proj" is stored; None: as floats."""
        return next((rule.storage for rule in self.rules if rule.matches(module)), None)


class ConfigSection:
    """A part of a configuration, whose entries are checked as they are read. where: its name in messages."""

    def __init__(self, entries: Any, where: str) -> None:
        self.where = where
        if not isinstance(entries, Mapping):
            raise ValueError(f"{where} is {brief(entries, 60)}; expected an object")
        self.entries = entries

    def fail(self, name: str, value: Any, expected: str, remedy: str = REMEDY) -> NoReturn:
        raise ValueError(f"{self.where}: {name}={brief(value)} is not supported; expected {expected}; {remedy}")

    def get(self, name: str, default: Any = None) -> Any:
        """The entry; null is the default."""
        value = self.entries.get(name)
        return default if value is None else value

    def first(self, *names: str) -> Any:
        """The entry under the first of these names that is there."""
        return next((self.entries[name] for name in names if self.entries.get(name) is not None), None)

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(name, default)
        if isinstance(value, (list, Mapping)) or value not in allowed or isinstance(value, bool) != (True in allowed):
            self.fail(name, value, " or ".join(map(repr, allowed)))
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, value, "true or false")
        return value

    def patterns(self, *names: str) -> tuple[str, ...]:
        """Patterns for a `Rule` under the first of these names that is there; none: ()."""
        found = self.first(*names)
        found = () if found is None else found
        if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
            self.fail(names[0], found, "a list of names")
        for pattern in found:
            if pattern.startswith("re:"):
                self.check_regex(names[0], pattern[3:])
        return tuple(found)

    def check_regex(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as e:
            self.fail(name, pattern, f"a regular expression ({e})")

    def group_size(self, *names: str) -> int:
        """Columns of a group; -1 is the whole row, 0 here."""
        value = self.first(*names)
        good = isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0)
        if not good:
            self.fail(names[0], value, "a positive integer, or -1")
        return max(value, 0)
