"""Which provider runs an op: what the user named, else what is preferred here, else `native`.

Highest first: a `with op.use(...)` block; `kernel_priority`; the environment variable `NANOVLLM_KERNELS`; the built-in
order; `native`. A provider that the user named must be available, or it is an error with the reason; one that is merely
preferred is passed over where it cannot run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.arguments import reject_unknown
from nanovllm.kernels.registry import NATIVE, Op, Provider, all_ops

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "NANOVLLM_KERNELS"
# What is tried, in this order, where nobody says otherwise.
PREFERRED = ("triton", NATIVE)


class Kernels:
    """The resolved choice: `kernels.rms_norm` is the function that was chosen for that op."""

    def __init__(self, chosen: Mapping[str, tuple[str, Callable[..., Any]]]) -> None:
        self.providers: Mapping[str, str] = MappingProxyType({name: provider for name, (provider, _) in chosen.items()})
        self._functions = {name: fn for name, (_, fn) in chosen.items()}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        functions = self.__dict__.get("_functions", {})
        if name not in functions:
            raise AttributeError(f"no op {name!r}; ops are {', '.join(sorted(functions))}")
        return functions[name]

    def __str__(self) -> str:
        """One line an op: its name and its provider."""
        width = max(map(len, self.providers))
        return "\n".join(f"{name:{width}}  {provider}" for name, provider in sorted(self.providers.items()))

    def summary(self) -> str:
        """The providers in use, most used first, for example "triton (8 ops), native (2 ops)"."""
        counts: dict[str, int] = {}
        for provider in self.providers.values():
            counts[provider] = counts.get(provider, 0) + 1
        return ", ".join(f"{p} ({n} ops)" for p, n in sorted(counts.items(), key=lambda item: -item[1]))


def resolve_kernels(
    device: torch.device, use_custom_kernels: bool = True, priority: Mapping[str, Sequence[str]] | None = None
) -> Kernels:
    """Pick a provider for every op, once, for everything that runs on `device`.

    Args:
        use_custom_kernels: False picks `native` everywhere.
        priority: providers to use for an op, best first; the first that is available is taken. "*" stands for every
            op that has a provider of that name.

    Raises:
        ValueError: an unknown op or provider is named, or none of those named for an op is available.
    """
    ops = all_ops()
    if not use_custom_kernels:
        return Kernels({name: (NATIVE, declared.native) for name, declared in ops.items()})
    sources = [_checked(priority or {}, "kernel_priority", ops), _environment()]
    chosen = {}
    for name, declared in ops.items():
        provider = _choose(declared, device, sources)
        chosen[name] = provider.name, _function(declared, provider, device)
    return Kernels(chosen)


def parse_priority(text: str) -> dict[str, list[str]]:
    """ "rms_norm=triton,native;*=native" -> {"rms_norm": ["triton", "native"], "*": ["native"]}."""
    priority = {}
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        name, equals, providers = entry.partition("=")
        names = [p.strip() for p in providers.split(",") if p.strip()]
        if not equals or not name.strip() or not names:
            raise ValueError(
                f"{entry!r} is not of the form op=provider or op=provider,provider; separate entries with ';'"
            )
        priority[name.strip()] = names
    return priority


def default_function(declared: Op, device: torch.device) -> Callable[..., Any]:
    """What a plain call of an op runs on `device`."""
    return _default_function(declared, device.type, device.index, os.environ.get(ENVIRONMENT_VARIABLE, ""))


@cache
def _default_function(declared: Op, kind: str, index: int | None, environment: str) -> Callable[..., Any]:
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    return _function(declared, _choose(declared, device, [_environment()]), device)


def _environment() -> dict[str, list[str]]:
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    try:
        return _checked(parse_priority(text), ENVIRONMENT_VARIABLE, all_ops())
    except ValueError as e:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={text!r}: {e}") from e


def _checked(priority: Mapping[str, Sequence[str]], who: str, ops: Mapping[str, Op]) -> dict[str, list[str]]:
    checked = {}
    for name, providers in priority.items():
        try:
            reject_unknown(who, [name], ["*", *ops])
        except TypeError as e:
            raise ValueError(str(e)) from None
        checked[name] = [providers] if isinstance(providers, str) else list(providers)
        if name == "*":
            known = {p for declared in ops.values() for p in declared.providers}
            unknown = [p for p in checked[name] if p not in known]
            if unknown:
                raise ValueError(f"{who} names {unknown[0]!r}; providers are {', '.join(sorted(known))}")
    return checked


def _wanted(declared: Op, sources: Sequence[Mapping[str, Sequence[str]]]) -> Sequence[str]:
    """What the first source that speaks of this op names for it, best first."""
    for named in sources:
        if declared.name in named:
            return named[declared.name]
        everywhere = [p for p in named.get("*", ()) if p in declared.providers]
        if everywhere:
            return everywhere
    return ()


def _choose(declared: Op, device: torch.device, sources: Sequence[Mapping[str, Sequence[str]]]) -> Provider:
    errors = []
    for name in _wanted(declared, sources):
        try:
            return declared.require(name, device, f"the choice of kernels for {declared.name!r}")
        except ValueError as e:
            if name not in declared.providers:
                raise
            errors.append(str(e))
    if errors:
        raise ValueError("; ".join(errors))
    return next(p for p in _available(declared, device))


def _available(declared: Op, device: torch.device) -> list[Provider]:
    """The preferred providers that can run on the device, best first; `native` is always among them."""
    candidates = [declared.providers[name] for name in PREFERRED if name in declared.providers]
    return [p for p in candidates if p.support(device) is None]


def _function(declared: Op, provider: Provider, device: torch.device) -> Callable[..., Any]:
    """The provider's own function, or, if it is choosy about arguments, one that passes on what it does not accept."""
    if provider.accepts is None:
        return provider.fn
    accepts, fn, native = provider.accepts, provider.fn, declared.native
    warned = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        reason = accepts(*args, **kwargs)
        if reason is None:
            return fn(*args, **kwargs)
        if not warned:
            warned = True
            logger.warning(
                "%s: %s does not take these arguments (%s); using native", declared.name, provider.name, reason
            )
        return native(*args, **kwargs)

    return call
