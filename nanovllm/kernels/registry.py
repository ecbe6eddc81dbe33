"""Ops and their providers: one declaration per op, and who may compute it.

An *op* is a function with a readable PyTorch reference, which is its provider `native`. Other *providers* of the same
op (Triton, CUDA C++, a library) register beside it. Which one runs is decided in `selection.py`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

NATIVE = "native"

Support = Callable[[torch.device], "str | None"]


def anywhere(device: torch.device) -> str | None:
    """The support of a provider that runs on every device."""
    return None


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Attributes:
        target: the function, or "module:function", which is imported when it is first wanted.
        support: static. Given a device, None if the provider can run there at all, else the reason and what to do.
        accepts: dynamic and pure. Given a call's arguments, None if the provider can take them, else the reason.
            None: it takes whatever the op's documentation allows.
    """

    name: str
    target: Callable[..., Any] | str
    support: Support = anywhere
    accepts: Callable[..., str | None] | None = None

    @cached_property
    def fn(self) -> Callable[..., Any]:
        if not isinstance(self.target, str):
            return self.target
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)


class Op:
    """A named operation. Calling it runs the provider that is chosen for the device of its first tensor."""

    def __init__(self, native: Callable[..., Any]) -> None:
        functools.update_wrapper(self, native)
        self.name = native.__name__
        self.native = native
        """The reference."""
        self.providers: dict[str, Provider] = {NATIVE: Provider(NATIVE, native)}
        self._forced: ContextVar[str | None] = ContextVar(f"provider of {self.name}", default=None)

    def provider(
        self, name: str, support: Support = anywhere, accepts: Callable[..., str | None] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: register a function as the provider `name` of this op."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.add(Provider(name, fn, support, accepts))
            return fn

        return register

    def add(self, provider: Provider) -> None:
        if provider.name in self.providers:
            raise ValueError(f"op {self.name!r} already has a provider {provider.name!r}")
        self.providers[provider.name] = provider

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
        from nanovllm.kernels.selection import default_function

        device = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), torch.device("cpu"))
        forced = self._forced.get()
        if forced is not None:
            return self.require(forced, device, f"use({forced!r})").fn(*args, **kwargs)
        return default_function(self, device)(*args, **kwargs)


_OPS: dict[str, Op] = {}


def op(native: Callable[..., Any]) -> Op:
    """Decorator: declare an op by its torch reference, which becomes the provider `native`."""
    declared = Op(native)
    if declared.name in _OPS:
        raise ValueError(f"op {declared.name!r} is declared twice")
    _OPS[declared.name] = declared
    return declared


def all_ops() -> Mapping[str, Op]:
    """Every declared op by name, with the providers that come with the package."""
    import nanovllm.kernels.ops
    import nanovllm.kernels.providers  # noqa: F401

    return MappingProxyType(_OPS)
