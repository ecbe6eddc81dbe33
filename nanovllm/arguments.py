"""Arguments as users write them: unknown ones are errors that name the nearest, and a dtype may have its short name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def full_dtype(name: str) -> str:
    """A dtype's name as torch has it: "bf16" -> "bfloat16"; any other name as it is."""
    return SHORT_DTYPES.get(name, name)


def reject_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError that names the first of `given` that is not in `known`, and what was probably meant.

    Args:
        kind: what takes the arguments, as the user wrote it ("LLM", "SamplingParams").
        given: the names that were passed.
        known: the names that are taken.
    """
    known = list(known)
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
            raise TypeError(f"{kind} got an unknown argument {name!r}; {remedy}")


def rejects_unknown(cls: T | None = None, *, renamed: Mapping[str, str] | None = None) -> Any:
    """Class decorator, above `@dataclass`: unknown keywords of the constructor raise as `reject_unknown` says.

    The generated `__init__` is wrapped rather than a `__new__` or a metaclass added, so that `help()`, editors and
    `inspect.signature` go on showing the fields.

    Args:
        renamed: older names of arguments, which are taken as well.
    """
    if cls is None:
        return functools.partial(rejects_unknown, renamed=renamed)
    wrapped: Any = cls  # a class, whose constructor a type checker takes for that of an instance
    init = wrapped.__init__
    known = [f.name for f in fields(cls) if f.init]
    names = renamed or {}

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for old, new in names.items():
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(
                        f"{cls.__name__} got {old!r}, an older name of {new!r}, and {new!r}; pass one of them"
                    )
                kwargs[new] = kwargs.pop(old)
        reject_unknown(cls.__name__, kwargs, known)
        init(self, *args, **kwargs)

    wrapped.__init__ = __init__
    return cls
