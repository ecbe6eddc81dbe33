"""Calling an op: its arguments are checked, then the provider runs that is selected for their device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from nanovllm.arguments import did_you_mean
from nanovllm.kernels.op import torch_library
from nanovllm.kernels.op.declaration import OpDeclaration
from nanovllm.kernels.op.provider import NATIVE, Provider
from nanovllm.kernels.op.registry import add_op, current_plugin
from nanovllm.kernels.op.selection import default_choice, fall_back_to_native, forced_function


class Op(OpDeclaration):
    """A named operation. Calling it checks the arguments and runs the provider that is selected for their device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        functools.update_wrapper(self, self.native, updated=())
        self._forced: ContextVar[str | None] = ContextVar(f"provider of {self.name}", default=None)

    def __repr__(self) -> str:
        """The op's parameters with the shapes of tensors, and its providers; `help` shows it too."""
        parameters = (f"{name} {self.arguments.get(name, '')}".rstrip() for name in self.records.flat.parameters)
        return f"<op {self.name}({', '.join(parameters)}); providers: {', '.join(self.providers)}>"

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within the block, calls of this op run the provider `name`, in this thread or task."""
        if name not in self.providers:
            remedy = did_you_mean(str(name), self.providers) or f"register one with @{self.name}.provider({name!r})"
            raise ValueError(f"op {self.name!r} has no provider {name!r}; it has {', '.join(self.providers)}; {remedy}")
        token = self._forced.set(name)
        try:
            yield
        finally:
            self._forced.reset(token)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            given = dict(zip(self.parameters, args), **kwargs)
            return getattr(torch.ops.nanovllm, self.name)(**self.records.flatten(given))
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{self.name}: {e}; it takes ({', '.join(self.parameters)})") from None
        self.check(self.records.flatten(bound.arguments))
        return self.run(bound)

    def run(self, bound: inspect.BoundArguments, traced: bool = False, fresh: bool = False) -> Any:
        """Call the provider that is chosen for the arguments' device, without checking them first.

        Args:
            traced: it is to be differentiated, on tensors without values: by the reference, or there is an error.
            fresh: no argument's memory is reused, though the op is declared to do so.
        """
        device, forced = device_of(bound.arguments), self._forced.get()
        if forced is None:
            provider, fn = default_choice(self, device)
            if (reason := self.why_reference(provider, bound.arguments, traced)) is not None:
                fn = fall_back_to_native(self, provider.name, reason)
                provider = self.providers[NATIVE]
            return self._traced(bound) if traced else self._call(provider, fn, bound, fresh)
        provider = self.require(forced, device, f"use({forced!r})")
        reason = self.why_reference(provider, bound.arguments, traced)
        if reason is None:
            reason = self.refusal(provider, *bound.args, **bound.kwargs)
        if reason is not None:
            raise ValueError(f"use({forced!r}): the provider of {self.name} does not take these arguments: {reason}")
        return self._traced(bound) if traced else self._call(provider, forced_function(self, provider), bound, fresh)

    def _call(self, provider: Provider, fn: Callable[..., Any], bound: inspect.BoundArguments, fresh: bool) -> Any:
        if not fresh or not self.reuses:
            return fn(*bound.args, **bound.kwargs)
        if provider.takes_fresh:
            return fn(*bound.args, **bound.kwargs, fresh=True)
        for name in self.reuses:
            bound.arguments[name] = bound.arguments[name].clone()
        return fn(*bound.args, **bound.kwargs)

    def _traced(self, bound: inspect.BoundArguments) -> Any:
        """The reference. Its errors keep their type, by which torch.compile knows where it may break a graph."""
        try:
            return self.native(*bound.args, **bound.kwargs)
        except RuntimeError as e:
            remedy = "call it under torch.no_grad(), or where the graph may break (not fullgraph=True)"
            e.args = (f"{self.name} requires grad here, and its reference cannot be traced; {remedy}: {e}", *e.args[1:])
            raise

    def why_reference(self, provider: Provider, arguments: Mapping[str, Any], traced: bool = False) -> str | None:
        """Why a plain call must run the reference rather than this provider; None: the provider may run it.

        Only the reference computes in dtypes that the op does not declare. Of the package's own providers only the
        reference has a backward pass, and of all providers only the reference has one that torch.compile can trace.
        """
        if provider.name == NATIVE:
            return None
        if self.inputs is not None and (leading := self.check.leading_float(arguments)) is not None:
            name, dtype = leading
            if dtype not in self.inputs.dtypes:
                wanted = " or ".join(map(str, self.inputs.dtypes))
                return f"{name}: expected {wanted}, not {dtype}".replace("torch.", "")
        if (provider.origin is None or traced) and torch.is_grad_enabled():
            for name, value in self.records.flatten(arguments).items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    traceable = "" if provider.origin is None else " that torch.compile can trace"
                    lacks = f"there is no backward pass{traceable}"
                    return f"{name} requires grad, and {lacks}; call it under torch.no_grad(), or detach {name}"
        return None


def device_of(arguments: Mapping[str, Any]) -> torch.device:
    """The device of the first tensor among a call's arguments."""
    return next((a.device for a in arguments.values() if isinstance(a, torch.Tensor)), torch.device("cpu"))


def op(native: Callable[..., Any] | None = None, **declaration: Any) -> Any:
    """Decorator: declare an op by its torch reference, which becomes the provider `native`.

    `@op` alone is enough to run. The keyword arguments are those of `OpDeclaration`: with `inputs`, `cost` and
    `tolerance` the op is verified and benchmarked as well.

    Raises:
        ValueError: there is an op of that name already.
    """
    if native is None:
        return functools.partial(op, **declaration)
    declared = Op(native, **declaration)
    add_op(declared)
    if declared.exported and current_plugin() is None:  # a plugin's ops are added when all of it has loaded
        torch_library.unregister(declared.name)  # of a cell that is run again
        torch_library.register_or_warn(declared)
    return declared
