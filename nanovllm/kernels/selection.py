"""Which provider runs an op: what the user named, else what was measured to be fastest here, else `native`.

Highest first: a `with op.use(...)` block; `use_custom_kernels=False`; `kernel_priority`; the environment variable `NANOVLLM_KERNELS`; the plugins
that were asked for; the table measured on this GPU (`tables.py`); the built-in order; `native`. A provider that the user
named must be available, or it is an error with the reason; one that is merely preferred is passed over where it cannot run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.arguments import reject_unknown
from nanovllm.kernels.plugins import failures, load_plugins
from nanovllm.kernels.reasons import describe_call
from nanovllm.kernels.registry import NATIVE, KernelError, Op, Provider, all_ops
from nanovllm.kernels.tables import measured_order

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "NANOVLLM_KERNELS"
# What is tried, in this order, on a GPU for which nothing was measured.
PREFERRED = ("triton", NATIVE)

Decorate = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
"""(op, provider, function) -> the function to call in its place, for example one that records what it is given."""


Sources = Mapping[str, Mapping[str, Sequence[str]]]
"""Who speaks (`kernel_priority`, the environment variable), in the order in which they count -> op -> providers, best first."""

_decorate: ContextVar[Decorate | None] = ContextVar("what decorates the functions of engines", default=None)


@contextmanager
def decorated_kernels(decorate: Decorate) -> Iterator[None]:
    """Engines that are made within the block call `decorate(op, provider, function)` in place of each op's function."""
    token = _decorate.set(decorate)
    try:
        yield
    finally:
        _decorate.reset(token)


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
    device: torch.device,
    use_custom_kernels: bool = True,
    priority: Mapping[str, Sequence[str]] | None = None,
    plugins: Sequence[str] = (),
) -> Kernels:
    """Pick a provider for every op, once, for everything that runs on `device`.

    Args:
        use_custom_kernels: False picks `native` everywhere.
        priority: providers to use for an op, best first; the first that is available is taken. "*" stands for every
            op that has a provider of that name.
        plugins: files or modules to load (`plugins.py`); what they register is preferred to what comes with the package.

    Raises:
        ValueError: an unknown op or provider is named, or none of those named for an op is available; an argument of
            another type.
    """
    if not isinstance(use_custom_kernels, bool):
        raise ValueError(f"use_custom_kernels={use_custom_kernels!r}: must be True or False")
    origins = load_plugins(plugins)
    ops = all_ops()
    sources = {"kernel_priority": _checked(priority or {}, "kernel_priority", ops), **_environment()}
    for who, named in sources.items():  # all of them, whether they are used or not
        _reject_unknown_providers(named, ops, who)
    chosen, decorate = {}, _decorate.get()
    for name, declared in ops.items():
        provider = declared.providers[NATIVE]
        if use_custom_kernels and not _yields(declared, ops, sources, origins):
            provider = _choose(declared, device, sources, origins)
        fn = _function(declared, provider)
        chosen[name] = provider.name, decorate(name, provider.name, fn) if decorate else fn
    return Kernels(chosen)


def _yields(fused: Op, ops: Mapping[str, Op], sources: Sources, plugins: Sequence[str]) -> bool:
    """Whether a fused op is not to be used, since the user spoke of an op that it stands for, and not of itself."""
    _, wanted = _wanted(fused, sources)
    if any(fused.name in named for named in sources.values()):
        return False
    parts = [ops[name] for name in fused.fuses]
    return any(
        _wanted(part, sources)[1] not in ((), wanted)
        or any(p.origin is not None and p.origin in plugins for p in part.providers.values())
        for part in parts
    )


def rank(declared: Op, device: torch.device, plugins: Sequence[str] = ()) -> list[Provider]:
    """The op's available providers, the one that runs first: in an engine with these plugins; without any, in a plain call."""
    available = [p for p in declared.providers.values() if p.support(device) is None]
    first = _first(declared, device, plugins)
    preferred = _preferred(declared, device, plugins)
    return sorted(
        available,
        key=lambda p: (p is not first, preferred.index(p.name) if p.name in preferred else len(preferred)),
    )


def explain(declared: Op, device: torch.device, plugins: Sequence[str] = ()) -> str:
    """Why the first of `rank` is the first, as the end of a sentence."""
    first = _first(declared, device, plugins)
    if _yields(declared, all_ops(), _environment(), plugins):
        return f"in an engine it is not used, since one of the ops that it fuses was named: {', '.join(declared.fuses)}"
    if _wanted(declared, _environment())[1]:
        return f"{ENVIRONMENT_VARIABLE}={os.environ[ENVIRONMENT_VARIABLE]!r} names it"
    if first.origin is not None:
        return f"it comes from the plugin {first.origin}"
    if device.type == "cpu":
        return "on a CPU the reference runs unless another provider is named"
    if measured_order(declared.name, device):
        return "it is the first available in the order measured on this GPU"
    return f"nothing was measured for it on this GPU, and the built-in order is {', '.join(PREFERRED)}"


def _first(declared: Op, device: torch.device, plugins: Sequence[str]) -> Provider:
    if _yields(declared, all_ops(), _environment(), plugins):
        return declared.providers[NATIVE]
    return _choose(declared, device, _environment(), plugins)


def parse_priority(text: str) -> dict[str, list[str]]:
    """ "rms_norm=triton,native;*=native" -> {"rms_norm": ["triton", "native"], "*": ["native"]}."""
    priority = {}
    for entry in filter(None, (e.strip() for e in text.split(";"))):
        name, equals, providers = entry.partition("=")
        names = [p.strip() for p in providers.split(",") if p.strip()]
        if not equals or not name.strip() or not names:
            raise ValueError(
                f"{entry!r} is not of the form op=provider or op=provider,provider (*=provider for all); "
                "separate entries with ';'"
            )
        if name.strip() in priority:
            raise ValueError(f"{name.strip()!r} is given twice; name several providers as {name.strip()}=provider,provider")
        priority[name.strip()] = names
    return priority


def default_function(declared: Op, device: torch.device) -> Callable[..., Any]:
    """What a plain call of an op runs on `device`."""
    return default_choice(declared, device)[1]


def default_choice(declared: Op, device: torch.device) -> tuple[Provider, Callable[..., Any]]:
    """The provider of a plain call of an op on `device`, and its function."""
    return _default_choice(declared, device.type, device.index, os.environ.get(ENVIRONMENT_VARIABLE, ""))


def forget_defaults() -> None:
    """Choose anew for plain calls: a provider has gone."""
    _default_choice.cache_clear()
    native_instead.cache_clear()


@cache
def _default_choice(
    declared: Op, kind: str, index: int | None, environment: str
) -> tuple[Provider, Callable[..., Any]]:
    load_plugins(())  # the environment may name a provider of an installed one
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    provider = _choose(declared, device, _environment())
    return provider, _function(declared, provider)


@cache
def native_instead(declared: Op, provider: str, reason: str) -> Callable[..., Any]:
    """The reference, for calls that are not for the provider that was chosen; says so once for each reason."""
    _warn(declared, provider, reason)
    return bind(declared, declared.providers[NATIVE])


def _warn(declared: Op, provider: str, reason: str) -> None:
    logger.warning("%s: %s does not take these arguments (%s); using native", declared.name, provider, reason)


def check_priority(priority: Mapping[str, Sequence[str]], who: str) -> None:
    """A ValueError, in the name of `who`, for an op or provider that is neither ours nor an installed plugin's."""
    load_plugins(())
    ops = all_ops()
    _reject_unknown_providers(_checked(priority, who, ops), ops, who)


def _reject_unknown_providers(named: Mapping[str, Sequence[str]], ops: Mapping[str, Op], who: str) -> None:
    for declared in ops.values():
        for name in named.get(declared.name, ()):
            _reject_unknown_provider(declared, name, who)


def _environment() -> dict[str, dict[str, list[str]]]:
    """The environment variable, as the one source that it is."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    try:
        priority = parse_priority(text)
    except ValueError as e:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={text!r}: {e}") from e
    return {ENVIRONMENT_VARIABLE: _checked(priority, ENVIRONMENT_VARIABLE, all_ops())}


def _checked(priority: Mapping[str, Sequence[str]], who: str, ops: Mapping[str, Op]) -> dict[str, list[str]]:
    if not isinstance(priority, Mapping) or not all(isinstance(name, str) for name in priority):
        raise ValueError(f'{who}={priority!r}: must map ops to providers, for example {{"rms_norm": ["triton"]}}')
    checked = {}
    for name, providers in priority.items():
        try:
            reject_unknown(who, [name], ["*", *ops])
        except TypeError as e:
            raise ValueError(str(e).replace(" got an unknown argument", ": unknown op")) from None
        named = [providers] if isinstance(providers, str) else providers
        if not isinstance(named, Sequence) or not named or not all(isinstance(p, str) for p in named):
            raise ValueError(
                f'{who}: {name!r} is given {providers!r}; must be the names of providers, best first, for example ["triton"]'
            )
        checked[name] = list(named)
        if name == "*":
            known = {p for declared in ops.values() for p in declared.providers}
            unknown = [p for p in checked[name] if p not in known]
            if unknown:
                raise ValueError(f"{who} names {unknown[0]!r}; providers are {', '.join(sorted(known))}")
    return checked


def _wanted(declared: Op, sources: Sources) -> tuple[str, Sequence[str]]:
    """(the first source that speaks of this op, what it names for it, best first)."""
    for who, named in sources.items():
        if declared.name in named:
            return who, named[declared.name]
        everywhere = [p for p in named.get("*", ()) if p in declared.providers]
        if everywhere:
            return who, everywhere
    return "", ()


def _reject_unknown_provider(declared: Op, name: str, who: str) -> None:
    if name not in declared.providers:
        unknown = f"{who} names {name!r}, but the providers of {declared.name!r} are {', '.join(declared.providers)}"
        raise ValueError("; ".join((unknown, *(f"plugin {p} failed: {r}" for p, r in failures().items()))))


def _choose(declared: Op, device: torch.device, sources: Sources, plugins: Sequence[str] = ()) -> Provider:
    errors = []
    who, wanted = _wanted(declared, sources)
    for name in wanted:
        _reject_unknown_provider(declared, name, who)
        try:
            return declared.require(name, device, who)
        except ValueError as e:
            errors.append(str(e))
    if errors:
        raise ValueError("; ".join(errors))
    candidates = (declared.providers[name] for name in _preferred(declared, device, plugins))
    return next((p for p in candidates if p.support(device) is None), declared.providers[NATIVE])


def _preferred(declared: Op, device: torch.device, plugins: Sequence[str]) -> list[str]:
    """Names of providers in the order in which they are tried where nobody names one."""
    asked_for = [p.name for p in declared.providers.values() if p.origin is not None and p.origin in plugins]
    # On a CPU a Triton kernel runs in Triton's interpreter, which is there to test it.
    usual = (measured_order(declared.name, device) or PREFERRED) if device.type == "cuda" else (NATIVE,)
    return asked_for + [name for name in usual if name in declared.providers and name not in asked_for]


def bind(declared: Op, provider: Provider) -> Callable[..., Any]:
    """The provider's function; what it raises names op, provider and arguments.

    Raises:
        KernelError: the provider cannot be imported.
    """
    who = f"op {declared.name!r}, provider {provider.name!r}"
    try:
        fn = provider.fn
    except Exception as e:
        raise KernelError(f"{who}: cannot be imported: {type(e).__name__}: {e}") from e

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            given = describe_call(args, kwargs)
            if isinstance(e, (ValueError, TypeError, torch.OutOfMemoryError)):
                # These speak of the arguments, or are for the caller to act on: they stay what they are.
                _add_note(e, f"{who}, called with ({given})")
                raise
            raise KernelError(f"{who}, called with ({given}): {e}") from e

    return call


def _add_note(error: BaseException, note: str) -> None:
    """A line below the error's message; before Python 3.11, which has notes, of the message."""
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(note)
    else:
        error.args = ("\n".join(filter(None, (*map(str, error.args), note))),)


def _function(declared: Op, provider: Provider) -> Callable[..., Any]:
    """The provider's own function, or, if it is choosy about arguments, one that passes on what it does not accept."""
    fn = bind(declared, provider)
    if provider.accepts is None:
        return fn
    native = bind(declared, Provider(NATIVE, declared.native))
    warned = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        reason = declared.refusal(provider, *args, **kwargs)
        if reason is None:
            return fn(*args, **kwargs)
        if not warned:
            warned = True
            _warn(declared, provider.name, reason)
        return native(*args, **kwargs)

    return call
