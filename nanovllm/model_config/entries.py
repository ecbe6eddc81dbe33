"""The entries of a config.json, checked as they are read. Every error names the entry and its value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from nanovllm.wording import brief

MAX_COUNT = 2**31 - 1
"""A larger count is a damaged file."""


class Entries:
    """A config.json, or an object in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def get(self, name: str, default: Any = None) -> Any:
        """The entry, or the default where it is missing or null; a ValueError if that is None."""
        value = self.config.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"config.json has no {name!r}; is it the configuration of a decoder-only language model?")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
            fail(name, value, f": must be a positive integer, at most {MAX_COUNT}")
        return value

    def optional_count(self, name: str, default: int | None) -> int | None:
        """A positive integer; None if the entry is null. default: where there is no entry."""
        if name not in self.config:
            return default
        return None if self.config[name] is None else self.count(name)

    def optional_number(self, name: str, default: float | None) -> float | None:
        """A number above 0; None if the entry is null. default: where there is no entry."""
        value = self.config.get(name, default)
        if value is not None and (not is_number(value) or value <= 0):
            fail(name, value, ": must be a number above 0, or null")
        return None if value is None else float(value)

    def optional_flag(self, name: str) -> bool | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            fail(name, value, ": must be true or false")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.optional_flag(name)
        return default if value is None else value

    def one_of(self, name: str, default: str, supported: Mapping[str, str]) -> str:
        """What `supported` says of the entry."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in supported:
            fail(name, value, f" is not supported; supported are {', '.join(map(repr, supported))}")
        return supported[value]


def fail(name: str, value: Any, remedy: str) -> NoReturn:
    """Raise a ValueError. remedy: follows the name and the value."""
    raise ValueError(f"config.json: {name}={brief(value)}{remedy}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be beyond any float; NaN is not <= anything
