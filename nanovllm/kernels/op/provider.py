"""A provider: one implementation of an op, and what it can do.

A provider's functions are named ("module:function") rather than imported, so that a machine that cannot run a provider
imports none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from nanovllm.wording import brief

logger = logging.getLogger(__name__)

NATIVE = "native"

Support = Callable[[torch.device], "str | None"]


class Prepacked(Protocol):
    """A weight [rows, columns] in the form that a provider multiplies with fastest."""

    operand: torch.Tensor
    """What the provider's function takes as its weight: [rows, columns], of the weight's dtype, maybe opaque."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    def dense(self) -> torch.Tensor:
        """[rows, columns], the weight, of its dtype."""

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The rows that int64 [n] names: [n, columns]. Only if it was made to be readable."""


class KernelError(RuntimeError):
    """A provider failed while it ran. The message names op, provider and arguments; the cause is attached."""


def anywhere(device: torch.device) -> str | None:
    """The support of a provider that runs on every device."""
    return None


def imported(target: str) -> Any:
    """The object that "module:name" names. Raises ImportError, or AttributeError if the module has no such name."""
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise AttributeError(f"{module_name} has no function {name!r}; write it there, or import it there")
    return getattr(module, name)


def _function(field: str) -> cached_property[Any]:
    """The function that a field of `Provider` is or names; None: the field is None."""

    def get(provider: Provider) -> Any:
        value = getattr(provider, field)
        return imported(value) if isinstance(value, str) else value

    return cached_property(get)


@dataclass(frozen=True)
class Provider:
    """One implementation of an op. A function may be given as such, or as "module:function", imported at its first use.

    Attributes:
        name: the name in `NANOVLLM_KERNELS`: without ";", "=", "," or "*", and without spaces around it.
        target: the function that computes the op.
        support: static. Given a device, None if the provider can run there at all, else the reason and what to do.
        accepts: dynamic and pure. Given a call's arguments, None if the provider can take them, else the reason.
            None: the provider takes all that the op's documentation allows.
        origin: the plugin that registered the provider; None: this package.
        architectures: where it runs, for people: "any", "sm_80+" or "sm_80, sm_90".
        capturable: whether a CUDA graph can hold a call. False if the host plans every call anew.
        takes_out: the function has a parameter `out`, a tensor that takes the result.
        takes_concurrent: the function has a parameter `concurrent`: True while other kernels run at the same time.
        takes_fresh: the function has a parameter `fresh`: True where an argument must keep its memory, which the op may
            reuse otherwise.
        num_tokens: (weight) -> the numbers of tokens for which a layer should call this provider instead of the
            separate ops, as a container of ints. None: any number.
        prepack: (weight [rows, columns], whether rows must be readable) -> the `Prepacked` weight, with which a layer
            replaces its own; None: the weight stays as it is.
        planned: (a call's arguments) -> a function without parameters that runs the call with the host's planning done.
        preferred: where the built-in order takes it: "anywhere"; in "engines", but not in a plain call of the op nor in
            a model of another framework; or "nowhere", so that it runs if it is named or was measured to be fastest.

    Raises:
        ValueError: the name, the architectures, `support` or `accepts` have another form.
    """

    name: str
    target: Callable[..., Any] | str
    support: Support = anywhere
    accepts: Callable[..., str | None] | None = None
    origin: str | None = None
    architectures: str = "any"
    capturable: bool = True
    takes_out: bool = False
    takes_concurrent: bool = False
    takes_fresh: bool = False
    num_tokens: Callable[[torch.Tensor], Container[int]] | str | None = None
    planned: Callable[..., Callable[[], Any]] | str | None = None
    prepack: Callable[[torch.Tensor, bool], Prepacked | None] | str | None = None
    preferred: Literal["anywhere", "engines", "nowhere"] = "anywhere"

    def __post_init__(self) -> None:
        name, known = self.name, r"any|sm_\d+[af]?\+?(, ?sm_\d+[af]?\+?)*"
        if not isinstance(name, str) or not name or name != name.strip() or set(name) & set(";=,*"):
            raise ValueError(f"provider {name!r}: expected a name without ';', '=', ',', '*' and spaces around it")
        for parameter, takes in (("support", "the device"), ("accepts", "the arguments of a call")):
            if (given := getattr(self, parameter)) is not None and not callable(given):
                raise ValueError(
                    f"provider {name!r}: {parameter}={brief(given)}: expected a function of {takes} that returns None"
                    " or the reason why not"
                )
        if not isinstance(self.architectures, str) or not re.fullmatch(known, self.architectures):
            raise ValueError(
                f"provider {name!r}: architectures={self.architectures!r}: expected 'any' or such as 'sm_80+' or "
                "'sm_80, sm_90'"
            )

    fn = _function("target")
    num_tokens_fn = _function("num_tokens")
    prepack_fn = _function("prepack")
    planned_fn = _function("planned")


def bind(op: str, provider: Provider) -> Callable[..., Any]:
    """The provider's function; the errors that it raises name the op, the provider and the arguments.

    Raises:
        KernelError: the provider cannot be imported.
    """
    who = f"op {op!r}, provider {provider.name!r}"
    try:
        fn = provider.fn
    except Exception as e:
        raise KernelError(f"{who}: cannot be imported: {type(e).__name__}: {e}") from e

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            from nanovllm.kernels.testing.crash_report import place_and_remedy, what_failed

            note = f"{who}, called with ({describe_call(args, kwargs)})"
            if isinstance(e, (ValueError, TypeError, torch.OutOfMemoryError)):
                # These speak of the arguments, or the caller acts on them: they keep their type.
                add_note(e, note + (place_and_remedy(e) if provider.origin else ""))
                raise
            raise KernelError(f"{note}: {what_failed(e)}") from e

    return call


def add_note(error: BaseException, note: str) -> None:
    """Add a line below the error's message; before Python 3.11, which has notes, to the message."""
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    else:
        error.args = ("\n".join(filter(None, (*map(str, error.args), note))),)


def reason_if_it_fails(support: Support, who: str) -> Support:
    """A support function whose failure becomes a reason, with one warning, so that providers can still be listed."""
    warned = False

    @functools.wraps(support)
    def checked(device: torch.device) -> str | None:
        nonlocal warned
        try:
            return checked_reason(support(device))
        except Exception as e:
            reason = f"its support function failed: {type(e).__name__}: {e}"
            if not warned:
                warned = True
                logger.warning("%s: %s", who, reason)
            return reason

    return checked


def checked_reason(given: Any) -> str | None:
    """What `support` or `accepts` returned; a TypeError if it is neither None nor a string."""
    if given is None or isinstance(given, str):
        return given
    raise TypeError(
        f"it returned {brief(given, 40)}; it must return None where the provider can run, else a string that says why"
        " not"
    )


def describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call's arguments for people, tensors as their dtype, shape and strides."""
    return ", ".join([*map(_describe, args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())])


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        gap = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{gap}"
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{type(value).__name__}({describe_call((), fields)})"
    return brief(value, 40)
