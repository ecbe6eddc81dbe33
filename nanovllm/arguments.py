"""Arguments as users write them: unknown ones are errors that name the nearest, and a dtype may have its short name."""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any, TypeVar

from nanovllm.field_docs import DocWithFields
from nanovllm.foreign_arguments import AS_ASKED, ForeignArgument
from nanovllm.wording import brief

T = TypeVar("T", bound=type)
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

logger = logging.getLogger(__name__)


def full_dtype(name: str) -> str:
    """A dtype's name as torch has it: "bf16" -> "bfloat16"; any other name as it is."""
    return SHORT_DTYPES.get(name, name)


def whole_number(text: str) -> int:
    """A number as users write it, with the suffixes of vLLM: 8k is 8,000, 8K is 8,192, 25.6k is 25,600; also m and M.

    Raises:
        ValueError: it is none; the message has no name in front.
    """
    found = re.fullmatch(r"\s*([+-]?[0-9]+)(\.[0-9]+)?([kKmM]?)\s*", text)
    if found is None or (found[2] and found[3] not in ("k", "m")):
        wrong = "no decimals before K and M" if found and found[3] else "expected a whole number"
        raise ValueError(f"{wrong}; write such as 8192, 8K (8192), 8k (8000)")
    number, decimals, suffix = found.groups()
    factor = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}[suffix]
    return int(number) * factor if decimals is None else int(Decimal(number + decimals) * factor)


def with_option(message: str, options: Mapping[str, str], without_default: Collection[str] = ()) -> str:
    """A message that speaks of arguments in Python, with the options of the command line.

    At the beginning, "max_model_len=0: must be ..." becomes "--max-model-len=0: must be ...". Python's None is no value
    of an option: "or None for X" becomes "leave it out for X" where None is the option's default, and is dropped
    elsewhere. Further on, names with an underscore become options: "raise max_model_len" is "raise --max-model-len".

    Args:
        options: the name in Python -> the option, such as "--max-model-len".
        without_default: the names in Python whose default is None.
    """
    begin = re.match(r"([a-z]\w*)(?=[:=])", message)
    if begin and begin[1] in options:
        rest, comma, otherwise = message[begin.end() :].partition(", or None ")
        left_out = f"; leave it out {otherwise}" if comma and begin[1] in without_default else ""
        message = options[begin[1]] + rest + left_out
    # Not within quotes or paths.
    return re.sub(r"(?<![\w./'\"-])[a-z]+(_[a-z]+)+(?![\w/'\"]|\.\w)", lambda m: options.get(m[0], m[0]), message)


def name_options(error: Exception, options: Mapping[str, str], without_default: Collection[str] = ()) -> None:
    """Change the text of an error as `with_option` does, if the error has nothing but a text."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (with_option(error.args[0], options, without_default),)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question which name was probably meant: those that begin as `name` does, else the nearest; empty if none."""
    known = list(known)
    begin = [k for k in known if len(name) > 2 and k.startswith(name.lower())][:4]
    # a ratio of 0.6: below it, names were misleading
    likely = [repr(k) for k in begin or difflib.get_close_matches(name.lower(), known, n=1)]
    return f"did you mean {' or '.join(filter(None, (', '.join(likely[:-1]), likely[-1])))}?" if likely else ""


def reject_unknown(kind: str, given: Iterable[str], known: Iterable[str], all_of_them: str = "") -> None:
    """Raise a TypeError that names the first of `given` that is not in `known`, and what was probably meant.

    Args:
        kind: what takes the arguments, as the user wrote it ("LLM", "SamplingParams").
        given: the names that were passed.
        known: the names that are taken.
        all_of_them: what to say in place of all that are known, if nothing similar is.
    """
    known = list(known)
    for name in given:
        if name not in known:
            remedy = did_you_mean(name, known) or all_of_them or f"known are {', '.join(known)}"
            raise TypeError(f"{kind} got an unknown argument {name!r}; {remedy}")


def drop_foreign(kind: str, given: dict[str, Any], foreign: Mapping[str, ForeignArgument]) -> None:
    """Remove the arguments of other libraries that have no effect here from `given`, with a log line.

    It is a warning for those whose value contradicts what the engine does.

    Raises:
        TypeError: one of them asks for what is not supported; the message says why, and what to do instead.
    """
    dropped: dict[int, list[str]] = {logging.WARNING: [], logging.INFO: []}
    for name in [name for name in given if name in foreign]:
        value, argument = given.pop(name), foreign[name]
        if not argument.is_harmless(value):
            raise TypeError(f"{kind} got {name}={brief(value)}: {argument.answer}")
        as_asked = name not in AS_ASKED or argument._replace(harmless=AS_ASKED[name]).is_harmless(value)
        dropped[logging.INFO if as_asked else logging.WARNING].append(f"{name}={brief(value)} ({argument.answer})")
    for level, said in dropped.items():
        if said:
            logger.log(level, "%s takes these arguments without effect: %s", kind, "; ".join(said))


def rejects_unknown(
    called: str,
    renamed: Mapping[str, str] | None = None,
    foreign: Mapping[str, ForeignArgument] | None = None,
) -> Callable[[T], T]:
    """Class decorator, above `@dataclass`: unknown keywords of the constructor raise as `reject_unknown` says.

    The generated `__init__` is wrapped, so that `help()`, editors and `inspect.signature` go on showing the fields.
    `help()` also shows the strings below the fields.

    Args:
        called: the class's name in messages.
        renamed: older names of arguments, which are taken as well.
        foreign: arguments of other libraries, which `drop_foreign` handles.
    """

    def decorate(cls: T) -> T:
        wrapped: Any = cls  # a class, whose constructor a type checker takes for that of an instance
        init = wrapped.__init__
        known = [f.name for f in fields(wrapped) if f.init]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for old, new in (renamed or {}).items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(
                            f"{called} got {old!r}, an older name of {new!r}, and {new!r}; pass one of them"
                        )
                    kwargs[new] = kwargs.pop(old)
            if not kwargs.keys() <= known_set:
                drop_foreign(called, kwargs, foreign or {})
                reject_unknown(called, kwargs, known)
            init(self, *args, **kwargs)

        known_set = set(known)
        wrapped.__init__ = __init__
        wrapped.__doc__ = DocWithFields(wrapped.__doc__ or "")
        return cls

    return decorate
