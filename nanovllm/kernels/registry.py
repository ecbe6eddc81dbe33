"""Ops and their providers: one declaration per op, and the choice of who computes it.

An *op* is a function with a readable PyTorch reference, which is its provider `native`. Other *providers* of the
same op (Triton, CUDA C++, a library) register beside it. `resolve_kernels` picks one provider for every op, once,
when an engine starts; layers then call the picked function directly, with no dispatch on the way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, Mapping, Sequence

NATIVE = "native"


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    `support` is static: it returns None where this machine can run the provider, else the reason why not.
    """

    name: str
    fn: Callable[..., Any]
    support: Callable[[], str | None]


class Op:
    """A named operation; calling it runs the reference."""

    def __init__(self, native: Callable[..., Any]) -> None:
        functools.update_wrapper(self, native)
        self.name = native.__name__
        self.providers: dict[str, Provider] = {NATIVE: Provider(NATIVE, native, lambda: None)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.providers[NATIVE].fn(*args, **kwargs)

    def provider(self, name: str, support: Callable[[], str | None] = lambda: None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: register `fn` as the provider `name` of this op."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            if name in self.providers:
                raise ValueError(f"op {self.name!r} already has a provider {name!r}")
            self.providers[name] = Provider(name, fn, support)
            return fn

        return register


_OPS: dict[str, Op] = {}


def op(native: Callable[..., Any]) -> Op:
    """Decorator: declare an op by its torch reference, which becomes the provider `native`."""
    declared = Op(native)
    if declared.name in _OPS:
        raise ValueError(f"op {declared.name!r} is declared twice")
    _OPS[declared.name] = declared
    return declared


def all_ops() -> Mapping[str, Op]:
    """Every declared op by name."""
    import nanovllm.kernels.ops  # noqa: F401  (declares them)

    return MappingProxyType(_OPS)


class Kernels:
    """The resolved choice: `kernels.rms_norm` is the function of the provider chosen for that op."""

    def __init__(self, chosen: Mapping[str, Provider]) -> None:
        self.providers: Mapping[str, str] = MappingProxyType({name: p.name for name, p in chosen.items()})
        self._functions = {name: p.fn for name, p in chosen.items()}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(f"no op {name!r}; ops are {', '.join(sorted(self.__dict__.get('_functions', ())))}") from None

    def summary(self) -> str:
        """The providers in use, most used first, for example "native (9 ops)"."""
        counts: dict[str, int] = {}
        for provider in self.providers.values():
            counts[provider] = counts.get(provider, 0) + 1
        return ", ".join(f"{p} ({n} ops)" for p, n in sorted(counts.items(), key=lambda item: -item[1]))


def resolve_kernels(use_custom_kernels: bool = True, priority: Mapping[str, Sequence[str]] | None = None) -> Kernels:
    """Pick a provider for every op; `native` is always the last resort.

    Args:
        use_custom_kernels: False picks `native` everywhere.
        priority: providers to use for an op, best first. A provider named here must exist and be available.

    Raises:
        ValueError: `priority` names an unknown op, or a provider that is unknown or not available here.
    """
    ops = all_ops()
    priority = dict(priority or {})
    for name in priority:
        if name not in ops:
            raise ValueError(f"kernel_priority names the op {name!r}; ops are {', '.join(sorted(ops))}")
    chosen: dict[str, Provider] = {}
    for name, declared in ops.items():
        wanted = priority.get(name, ()) if use_custom_kernels else ()
        for provider_name in wanted:
            provider = declared.providers.get(provider_name)
            if provider is None:
                raise ValueError(
                    f"kernel_priority[{name!r}] names {provider_name!r}; this op's providers are {', '.join(declared.providers)}"
                )
            reason = provider.support()
            if reason is not None:
                raise ValueError(f"kernel_priority[{name!r}] names {provider_name!r}, which is not available: {reason}")
        chosen[name] = declared.providers[wanted[0] if wanted else NATIVE]
    return Kernels(chosen)
