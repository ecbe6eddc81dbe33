"""Ops and their providers: one declaration per op, and who may compute it.

An *op* is a function with a readable PyTorch reference, which is its provider `native`. Other *providers* of the same
op (Triton, CUDA C++, a library) register beside it. Which one runs is decided in `selection.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.arguments import reject_unknown
from nanovllm.kernels.op.declaration import TOLERANCE, ArgumentCheck, Cost, Inputs
from nanovllm.kernels.op.support import Support, checked_reason, describe_call, reason_if_it_fails

NATIVE = "native"


class KernelError(RuntimeError):
    """A provider failed while it ran. The message names op, provider and arguments; the cause is attached."""


def anywhere(device: torch.device) -> str | None:
    """The support of a provider that runs on every device."""
    return None


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Attributes:
        name: what `NANOVLLM_KERNELS` can name: no ";", "=", "," or "*" in it, and no space around it.
        target: the function, or "module:function", which is imported when it is first wanted.
        support: static. Given a device, None if the provider can run there at all, else the reason and what to do.
        accepts: dynamic and pure. Given a call's arguments, None if the provider can take them, else the reason.
            None: it takes whatever the op's documentation allows.
        origin: the plugin that it comes from; None: this package.
        architectures: where it runs, for people: "any", "sm_80+" or "sm_80, sm_90".

    Raises:
        ValueError: a name or architectures of another form.
    """

    name: str
    target: Callable[..., Any] | str
    support: Support = anywhere
    accepts: Callable[..., str | None] | None = None
    origin: str | None = None
    architectures: str = "any"

    def __post_init__(self) -> None:
        name, known = self.name, r"any|sm_\d+[af]?\+?(, ?sm_\d+[af]?\+?)*"
        if not isinstance(name, str) or not name or name != name.strip() or set(name) & set(";=,*"):
            raise ValueError(f"provider {name!r}: expected a name without ';', '=', ',', '*' and spaces around it")
        if not isinstance(self.architectures, str) or not re.fullmatch(known, self.architectures):
            raise ValueError(
                f"provider {name!r}: architectures={self.architectures!r}: expected 'any' or such as 'sm_80+' or 'sm_80, sm_90'"
            )

    @cached_property
    def fn(self) -> Callable[..., Any]:
        if not isinstance(self.target, str):
            return self.target
        module, _, function = self.target.partition(":")
        loaded = importlib.import_module(module)
        if not hasattr(loaded, function):
            raise AttributeError(f"{module} has no function {function!r}; write it there, or import it there")
        return getattr(loaded, function)


class Op:
    """A named operation. Calling it checks the arguments and runs the provider that is chosen for their device.

    Attributes:
        native: the reference.
        inputs: realistic inputs, for tests and benchmarks.
        cost: (arguments as the reference takes them) -> what such a call must do at least.
        tolerance: relative, per dtype, against the reference in float64.
        magnitude: of what is rounded on the way to a result that may be smaller: errors are relative to at least that.
        cancels: a result may be small where its arguments are not, as a difference or the tail of a GELU: errors of one that stands almost
            alone in its row are relative to at least the arguments' magnitude.
        mutates: arguments that the op writes to; they are results like its return value.
        reuses: arguments whose memory a provider may use for its results: not to be read after the call.
        fuses: ops that this one stands for: an engine does not use it where one of them is named, so that the name counts.
        compare: (got, arguments, dtype) -> None or what is wrong, where comparing numbers does not decide.
        fake: the reference on tensors without data, where the reference itself cannot run on such.
        origin: the plugin that declares it; None: this package, or a program.
    """

    def __init__(
        self,
        native: Callable[..., Any],
        *,
        arguments: Mapping[str, str] | None = None,
        inputs: Inputs | None = None,
        cost: Callable[..., Cost] | None = None,
        tolerance: Mapping[torch.dtype, float] | None = None,
        magnitude: float = 0.0,
        cancels: bool = False,
        mutates: Sequence[str] = (),
        reuses: Sequence[str] = (),
        fuses: Sequence[str] = (),
        compare: Callable[[Any, dict[str, Any], torch.dtype], str | None] | None = None,
        fake: Callable[..., Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, native)
        self.name = native.__name__
        self.native = native
        self.signature = inspect.signature(native)
        self.inputs = inputs
        self.cost = cost
        self.tolerance = {**TOLERANCE, **(tolerance or {})}
        self.magnitude = magnitude
        self.cancels = cancels
        self.mutates, self.reuses = tuple(mutates), tuple(reuses)
        self.fuses = tuple(fuses)
        self.compare = compare
        self.fake = fake
        self.check = ArgumentCheck(self.name, arguments or {}, self.signature)
        reject_unknown(f"arguments of {self.name}", self.check.patterns, self.signature.parameters)
        self.origin = _registering.get()
        self.providers: dict[str, Provider] = {NATIVE: Provider(NATIVE, native)}
        self._forced: ContextVar[str | None] = ContextVar(f"provider of {self.name}", default=None)

    def provider(
        self,
        name: str,
        support: Support = anywhere,
        accepts: Callable[..., str | None] | None = None,
        architectures: str = "any",
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: register a function as the provider `name` of this op.

        Args:
            support: device -> None, or why the provider cannot run there.
            accepts: the call's arguments -> None, or why the provider does not take them.
            architectures: where it runs, for people: "sm_80+".

        Raises:
            ValueError: the op has a provider of that name, the function does not take the op's parameters, or an argument is not
                what `Provider` takes.
        """

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            wanted, taken = (list(inspect.signature(f).parameters.values()) for f in (self.native, fn))
            generic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken)
            if not generic and [p.name for p in wanted] != [p.name for p in taken]:
                raise ValueError(
                    f"provider {name!r} of op {self.name!r}: expected the parameters "
                    f"({', '.join(p.name for p in wanted)}), not ({', '.join(p.name for p in taken)})"
                )
            # Of a module that was imported before it is named as a plugin, the functions say where they come from.
            module = getattr(fn, "__module__", None) or ""
            origin = _registering.get() or (None if module.partition(".")[0] == "nanovllm" else module)
            self.add(Provider(name, fn, support, accepts, origin, architectures))
            return fn

        return register

    def add(self, provider: Provider) -> None:
        """Register a provider. One that a plugin adds without an origin gets the plugin as its origin."""
        known = self.providers.get(provider.name)
        if known is not None:
            whose = f", from {known.origin}" if known.origin else ""
            raise ValueError(
                f"op {self.name!r} already has a provider {provider.name!r}{whose}; give yours another name"
            )
        support = reason_if_it_fails(provider.support, f"op {self.name!r}, provider {provider.name!r}")
        origin = provider.origin or _registering.get()
        self.providers[provider.name] = dataclasses.replace(provider, support=support, origin=origin)

    def refusal(self, provider: Provider, *args: Any, **kwargs: Any) -> str | None:
        """Why a provider does not take a call; None: it does.

        Raises:
            KernelError: its `accepts` fails, or gives something else.
        """
        if provider.accepts is None:
            return None
        try:
            return checked_reason(provider.accepts(*args, **kwargs))
        except Exception as e:
            where = f"op {self.name!r}, provider {provider.name!r}, called with ({describe_call(args, kwargs)})"
            raise KernelError(f"{where}: its accepts function failed: {type(e).__name__}: {e}") from e

    def require(self, name: str, device: torch.device, who: str) -> Provider:
        """The provider `name`, which `who` asked for by name; a ValueError if it is unknown or cannot run on `device`."""
        provider = self.providers.get(name)
        if provider is None:
            raise ValueError(
                f"{who} names {name!r}, but the providers of {self.name!r} are {', '.join(self.providers)}"
            )
        reason = provider.support(device)
        if reason is not None:
            raise ValueError(f"{who} names {name!r}, which is not available for {self.name!r}: {reason}")
        return provider

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within the block, calls of this op run the provider `name`, in this thread or task."""
        if name not in self.providers:
            raise ValueError(f"op {self.name!r} has no provider {name!r}; it has {', '.join(self.providers)}")
        token = self._forced.set(name)
        try:
            yield
        finally:
            self._forced.reset(token)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(torch.ops.nanovllm, self.name)(*args, **kwargs)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{self.name}: {e}") from None
        self.check(bound.arguments)
        return self.run(bound)

    def run(self, bound: inspect.BoundArguments, traced: bool = False) -> Any:
        """Call the provider that is chosen for the arguments' device, without checking them first.

        Args:
            traced: it is to be differentiated, on tensors without values: by the reference, or there is an error.
        """
        from nanovllm.kernels.op.selection import bind, default_choice, native_instead

        device, forced = device_of(bound.arguments), self._forced.get()
        if forced is None:
            provider, fn = default_choice(self, device)
            if (reason := self.refuses(provider, bound.arguments, traced)) is not None:
                fn = native_instead(self, provider.name, reason)
            return self._traced(bound) if traced else fn(*bound.args, **bound.kwargs)
        provider = self.require(forced, device, f"use({forced!r})")
        reason = self.refuses(provider, bound.arguments, traced)
        if reason is None:
            reason = self.refusal(provider, *bound.args, **bound.kwargs)
        if reason is not None:
            raise ValueError(f"use({forced!r}): {self.name} cannot run there with these arguments: {reason}")
        return self._traced(bound) if traced else bind(self, provider)(*bound.args, **bound.kwargs)

    def _traced(self, bound: inspect.BoundArguments) -> Any:
        """The reference. Its errors keep their type, by which torch.compile knows where it may break a graph."""
        try:
            return self.native(*bound.args, **bound.kwargs)
        except RuntimeError as e:
            remedy = "call it under torch.no_grad(), or where the graph may break (not fullgraph=True)"
            e.args = (f"{self.name} requires grad here, and its reference cannot be traced; {remedy}: {e}", *e.args[1:])
            raise

    def refuses(self, provider: Provider, arguments: Mapping[str, Any], traced: bool = False) -> str | None:
        """Why a plain call is not for a provider, whichever it is: only the reference computes in dtypes that the op does not declare.

        And of those that come with the package only the reference has a backward pass; of all of them, one that can be traced.
        """
        if provider.name == NATIVE:
            return None
        if self.inputs is not None and (leading := self.check.leading_float(arguments)) is not None:
            name, dtype = leading
            if dtype not in self.inputs.dtypes:
                return f"{name}: expected {' or '.join(map(str, self.inputs.dtypes))}, not {dtype}".replace(
                    "torch.", ""
                )
        if (provider.origin is None or traced) and torch.is_grad_enabled():
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    lacks = "there is no backward pass" + (
                        " that torch.compile can trace" if provider.origin is not None else ""
                    )
                    return f"{name} requires grad, and {lacks}; call it under torch.no_grad(), or detach {name}"
        return None


def device_of(arguments: Mapping[str, Any]) -> torch.device:
    """The device of the first tensor among a call's arguments."""
    return next((a.device for a in arguments.values() if isinstance(a, torch.Tensor)), torch.device("cpu"))


_OPS: dict[str, Op] = {}
told_of_ops: list[Callable[[Op], None]] = []
"""Called with every op that is declared from now on."""
# The plugin that is being loaded, for what it registers.
_registering: ContextVar[str | None] = ContextVar("the plugin that registers", default=None)


def op(native: Callable[..., Any] | None = None, **declaration: Any) -> Any:
    """Decorator: declare an op by its torch reference, which becomes the provider `native`.

    `@op` alone is enough to run; the keyword arguments are those of `Op`, and what is given is tested and benchmarked.

    Raises:
        ValueError: there is an op of that name already.
    """
    if native is None:
        return functools.partial(op, **declaration)
    declared = Op(native, **declaration)
    if declared.name in _OPS:
        origin = _OPS[declared.name].origin
        raise ValueError(f"op {declared.name!r} is declared twice" + (f", before by {origin}" if origin else ""))
    _OPS[declared.name] = declared
    if _registering.get() is None:  # a plugin's are told of when all of it has loaded
        for tell in told_of_ops:
            tell(declared)
    return declared


def all_ops() -> Mapping[str, Op]:
    """Every declared op by name, with the providers that come with the package."""
    import nanovllm.kernels.op.builtin_providers  # noqa: F401

    return MappingProxyType(_OPS)


@contextmanager
def registering(plugin: str) -> Iterator[None]:
    """Within the block, what is registered belongs to a plugin; if the block raises, it is taken back."""
    ops, providers = dict(_OPS), {name: dict(o.providers) for name, o in _OPS.items()}
    token = _registering.set(plugin)
    try:
        yield
    except BaseException:
        for name in list(_OPS):
            if name not in ops:
                del _OPS[name]
            else:
                _OPS[name].providers.clear()
                _OPS[name].providers.update(providers[name])
        raise
    finally:
        _registering.reset(token)


def unregister(plugin: str) -> list[str]:
    """Take back what a plugin registered; the names of the ops that it had declared."""
    declared = [name for name, o in _OPS.items() if o.origin == plugin]
    for name in declared:
        del _OPS[name]
    for o in _OPS.values():
        for name in [p.name for p in o.providers.values() if p.origin == plugin]:
            del o.providers[name]
    return declared
