"""Which provider runs an op: the one that the user named, else the fastest one measured on this GPU, else `native`.

Highest first: a `with op.use(...)` block; `use_custom_kernels=False`; `kernel_priority`; the environment variable
`NANOVLLM_KERNELS`; the plugins that were named; the table measured on this GPU (`measured_order.py`); the built-in
order; `native`. A provider that the user named must be available, or there is an error with the reason. One that is
only preferred is passed over where it cannot run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from nanovllm.console import warn
from nanovllm.kernels.op.declaration import OpDeclaration
from nanovllm.kernels.op.measured_order import measured_order
from nanovllm.kernels.op.plugin_use import warn_if_it_serves_nothing, why_plugins_cannot_run
from nanovllm.kernels.op.plugins import load_plugins
from nanovllm.kernels.op.priority import (
    ENVIRONMENT_VARIABLE,
    Sources,
    checked_priority,
    from_environment,
    reject_unknown_provider,
    reject_unknown_providers,
    wanted_providers,
)
from nanovllm.kernels.op.provider import NATIVE, Provider, bind
from nanovllm.kernels.op.registry import all_ops
from nanovllm.kernels.op.result_check import checking_first
from nanovllm.kernels.op.selected_kernels import Kernels

logger = logging.getLogger(__name__)

# What is tried, in this order, on a GPU for which nothing was measured.
PREFERRED = ("triton", NATIVE)
PREFERRED_ON_CPU = ("cpu", "onednn", NATIVE)  # a Triton kernel runs there in Triton's interpreter, which is to test it

Decorate = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
"""(op, provider, function) -> the function to call in its place, for example one that records what it is given."""


_decorate: ContextVar[Decorate | None] = ContextVar("what decorates the functions of engines", default=None)


@contextmanager
def decorated_kernels(decorate: Decorate) -> Iterator[None]:
    """Engines that are made within the block call `decorate(op, provider, function)` in place of each op's function."""
    token = _decorate.set(decorate)
    try:
        yield
    finally:
        _decorate.reset(token)


def resolve_kernels(
    device: torch.device,
    use_custom_kernels: bool = True,
    priority: Mapping[str, Sequence[str]] | None = None,
    plugins: Sequence[str] = (),
    who: str = "kernel_priority",
    in_engine: bool = True,
) -> Kernels:
    """Pick a provider for every op, once, for everything that runs on `device`.

    Args:
        use_custom_kernels: False picks `native` everywhere.
        priority: providers of an op, best first; the first available one is taken. "*": every op that has it.
        plugins: files or modules to load (`plugins.py`); what they register comes before what the package has.
        who: what the user calls `priority`, for error messages.
        in_engine: the caller is an engine, which prepacks weights. If not, a provider that does so, or is preferred
            in engines alone, must be named.

    Raises:
        ValueError: an op or provider is unknown; none of those named for an op can run, or an argument is wrong.
    """
    if not isinstance(use_custom_kernels, bool):
        raise ValueError(f"use_custom_kernels={use_custom_kernels!r}: must be True or False")
    origins = load_plugins(plugins)
    ops = all_ops()
    sources = {who: checked_priority(priority or {}, who, ops), **from_environment()}
    for source, named in sources.items():  # every source, whether it decides or not
        reject_unknown_providers(named, ops, source)
    chosen, decorate = {}, _decorate.get()
    unused: dict[str, list[str]] = {}
    for name, declared in ops.items():
        provider = declared.providers[NATIVE]
        parts = _named_parts(declared, ops, sources, origins, device)
        if use_custom_kernels:
            usual = _choose(declared, device, sources, origins, in_engine)
            if not parts:
                provider = usual
            elif usual.name != NATIVE:
                unused[f"{name} ({usual.name})"] = parts
        fn = _function(declared, provider)
        chosen[name] = provider, decorate(name, provider.name, fn) if decorate else fn
    named_by_user = {name: wanted_providers(declared, sources)[1] for name, declared in ops.items()}
    for plugin in origins:
        providers = {name: provider for name, (provider, _) in chosen.items()}
        warn_if_it_serves_nothing(plugin, device, use_custom_kernels, providers, named_by_user)
    if unused:
        run_by = {part: chosen[part][0].name for parts in unused.values() for part in parts}
        text = f"{_chosen_run(run_by, named_by_user)} are not used: {', '.join(unused)}"
        of_engine = who == "kernel_priority"  # who names a few of a transformers model's ops has left out the others
        warn(logger, text) if origins or of_engine else logger.info("%s", text)
    return Kernels(chosen)


def _chosen_run(run_by: Mapping[str, str], named: Mapping[str, Sequence[str]]) -> str:
    """The first half of the sentence about fused ops that give way to what the user chose for their parts.

    Args:
        run_by: a part -> the provider that runs it.
        named: a part -> the providers that the user named for it; if there are none, a plugin's runs.
    """
    yours = [part for part in run_by if not named[part]]
    subjects = [f"your {'provider' if len(yours) == 1 else 'providers'} of {_listed(yours)}"] if yours else []
    for name in dict.fromkeys(name for part, name in run_by.items() if named[part]):
        of = [part for part in run_by if named[part] and run_by[part] == name]
        subjects.append(f"`{name}`, which you named for {_listed(of)},")
    verb = "runs" if len(subjects) == 1 and len(yours) < 2 else "run"
    return f"{_listed(subjects)} {verb}, so fused ops with {'it' if len(run_by) == 1 else 'them'}"


def _listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _named_parts(
    fused: OpDeclaration,
    ops: Mapping[str, OpDeclaration],
    sources: Sources,
    plugins: Sequence[str],
    device: torch.device,
) -> list[str]:
    """The ops that a fused op combines and that the user named a provider of, or loaded a plugin for that can run.

    If there are any, the fused op is not used, unless the user named a provider of it as well.
    """
    _, wanted = wanted_providers(fused, sources)
    if any(fused.name in named for named in sources.values()):
        return []
    return [
        name
        for name in fused.fuses
        if wanted_providers(ops[name], sources)[1] not in ((), wanted)
        or any(p.origin in plugins and p.support(device) is None for p in ops[name].providers.values() if p.origin)
    ]


def fused_ops_left_out(declared: OpDeclaration, device: torch.device, plugins: Sequence[str] = ()) -> list[str]:
    """The fused ops that engines with these plugins do not use, because the user chose a provider of this op.

    Each is followed by its provider that would run else; if that is `native`, nothing is lost.
    """
    ops, sources = all_ops(), from_environment()
    usual = {
        fused.name: _choose(fused, device, sources, plugins).name
        for fused in ops.values()
        if declared.name in _named_parts(fused, ops, sources, plugins, device)
    }
    return [f"{name} ({provider})" for name, provider in usual.items() if provider != NATIVE]


def ranked_providers(declared: OpDeclaration, device: torch.device, plugins: Sequence[str] = ()) -> list[Provider]:
    """The op's available providers, first the one that runs in an engine with these plugins."""
    available = [p for p in declared.providers.values() if p.support(device) is None]
    first = _first(declared, device, plugins)
    preferred = _preferred(declared, device, plugins)
    return sorted(
        available, key=lambda p: (p is not first, preferred.index(p.name) if p.name in preferred else len(preferred))
    )


def fastest_that_cannot_run(providers: Mapping[str, str], names: Collection[str], device: torch.device) -> list[str]:
    """Of ops whose provider is not the fastest measured on this GPU: each op, its provider and why, in words.

    Args:
        providers: op -> the provider that is selected.
        names: the ops to look at.
    """
    ops, named = all_ops(), from_environment()
    places: dict[str, list[str]] = {}
    for name in sorted(names):
        first = ops[name].providers.get(_preferred(ops[name], device, ())[0])
        if first is None or providers[name] == first.name or wanted_providers(ops[name], named)[1]:
            continue
        if (reason := first.support(device)) is not None:
            places.setdefault(reason, []).append(f"{name} runs on {providers[name]}, not on {first.name}")
    return [f"{'; '.join(places[reason])}: {reason}" for reason in places]


def why_selected(declared: OpDeclaration, device: torch.device, plugins: Sequence[str] = ()) -> str:
    """Why the first of `ranked_providers` is the first, as the end of a sentence."""
    first = _first(declared, device, plugins)
    if parts := _named_parts(declared, all_ops(), from_environment(), plugins, device):
        return f"engines do not use this op: it contains {', '.join(parts)}, of which you chose a provider"
    if wanted_providers(declared, from_environment())[1]:
        return f"{ENVIRONMENT_VARIABLE}={os.environ[ENVIRONMENT_VARIABLE]!r} names it"
    if first.origin is not None:
        return f"it comes from the plugin {first.origin}"
    if (why_not := why_plugins_cannot_run(plugins, device, declared)) is not None:
        return why_not
    if device.type == "cpu":
        if first.prepack is not None:
            return "on a CPU layers run it over weights that it has prepacked; a plain call runs the reference"
        if first.preferred == "engines":
            return "in an engine on a CPU it comes before the reference; a plain call runs the reference"
        if first.name != NATIVE:
            return "on a CPU it comes before the reference"
        return "on a CPU the reference runs unless another provider is named"
    if measured_order(declared.name, device):
        return "it is the first available in the order measured on this GPU"
    return f"nothing was measured for it on this GPU, and the built-in order is {', '.join(PREFERRED)}"


def _first(declared: OpDeclaration, device: torch.device, plugins: Sequence[str]) -> Provider:
    if _named_parts(declared, all_ops(), from_environment(), plugins, device):
        return declared.providers[NATIVE]
    return _choose(declared, device, from_environment(), plugins)


def default_choice(declared: OpDeclaration, device: torch.device) -> tuple[Provider, Callable[..., Any]]:
    """The provider of a plain call of an op on `device`, and its function.

    A plain call has prepacked nothing. A provider that prepacks weights, or that is preferred in engines alone, runs
    only if the environment names it.
    """
    key = (device.type, device.index, os.environ.get(ENVIRONMENT_VARIABLE, ""))
    choice = declared.resolved_calls.get(key)
    if choice is None:
        load_plugins(())  # the environment may name a provider of an installed one
        provider = _choose(declared, device, from_environment(), in_engine=False)
        choice = declared.resolved_calls[key] = provider, _function(declared, provider)
    return choice


def fall_back_to_native(declared: OpDeclaration, provider: str, reason: str) -> Callable[..., Any]:
    """The reference, for a call that the selected provider does not take; warns once for each reason."""
    key = (provider, reason)
    fn = declared.resolved_calls.get(key)
    if fn is None:
        _warn(declared, provider, reason)
        fn = declared.resolved_calls[key] = bind(declared.name, declared.providers[NATIVE])
    return fn


def forced_function(declared: OpDeclaration, provider: Provider) -> Callable[..., Any]:
    """The function of a provider that a `with op.use(...)` block names."""
    known, fn = declared.resolved_calls.get(("use", provider.name), (None, None))
    if fn is None or known is not provider:
        fn = checking_first(declared, provider, bind(declared.name, provider))
        declared.resolved_calls["use", provider.name] = provider, fn
    return fn


def _warn(declared: OpDeclaration, provider: str, reason: str) -> None:
    logger.warning("%s: %s does not take these arguments (%s); using native", declared.name, provider, reason)


def _choose(
    declared: OpDeclaration,
    device: torch.device,
    sources: Sources,
    plugins: Sequence[str] = (),
    in_engine: bool = True,
) -> Provider:
    """in_engine: as `resolve_kernels` has it."""
    errors = []
    who, wanted = wanted_providers(declared, sources)
    for name in wanted:
        reject_unknown_provider(declared, name, who)
        try:
            return declared.require(name, device, who)
        except ValueError as e:
            errors.append(str(e))
    if errors:
        raise ValueError("; ".join(errors))
    candidates = (declared.providers[name] for name in _preferred(declared, device, plugins))
    if not in_engine:
        candidates = (p for p in candidates if p.prepack is None and p.preferred != "engines")
    usable = (p for p in candidates if p.support(device) is None)
    return next(usable, declared.providers[NATIVE])


def _preferred(declared: OpDeclaration, device: torch.device, plugins: Sequence[str]) -> list[str]:
    """The names of providers in the order in which they are tried if the user names none."""
    of_plugins = [p.name for p in declared.providers.values() if p.origin is not None and p.origin in plugins]
    usual = measured_order(declared.name, device) if device.type == "cuda" else ()
    if not usual:
        built_in = PREFERRED if device.type == "cuda" else PREFERRED_ON_CPU
        usual = [
            name for name in built_in if name in declared.providers and declared.providers[name].preferred != "nowhere"
        ]
    return of_plugins + [name for name in usual if name in declared.providers and name not in of_plugins]


def _function(declared: OpDeclaration, provider: Provider) -> Callable[..., Any]:
    """The provider's function; with `accepts`, one that calls the reference for arguments that it does not take."""
    fn = checking_first(declared, provider, bind(declared.name, provider))
    if provider.accepts is None:
        return fn
    native = bind(declared.name, Provider(NATIVE, declared.native))
    warned = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        reason = declared.refusal(provider, *args, **kwargs)
        if reason is None:
            return fn(*args, **kwargs)
        if not warned:
            warned = True
            _warn(declared, provider.name, reason)
        out = kwargs.pop("out", None)  # the provider may have these parameters, the reference has not
        for name in ("concurrent", "fresh"):
            kwargs.pop(name, None)
        result = native(*args, **kwargs)
        return result if out is None else out.copy_(result)

    return call
