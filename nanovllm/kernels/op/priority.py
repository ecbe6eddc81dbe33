"""The providers that a user names, in an argument or in the environment: reading, checking and looking up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from nanovllm.arguments import did_you_mean, reject_unknown
from nanovllm.kernels.op.declaration import OpDeclaration
from nanovllm.kernels.op.plugins import failures, load_plugins
from nanovllm.kernels.op.registry import all_ops

ENVIRONMENT_VARIABLE = "NANOVLLM_KERNELS"

ALL_OPS = "`nanovllm kernels list` shows all ops"

Sources = Mapping[str, Mapping[str, Sequence[str]]]
"""Source (`kernel_priority`, the environment variable), the strongest first -> op -> providers, best first."""


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
            raise ValueError(
                f"{name.strip()!r} is given twice; name several providers as {name.strip()}=provider,provider"
            )
        priority[name.strip()] = names
    return priority


def priority_of_option(text: str | None) -> dict[str, list[str]]:
    """What the option --kernels says; None: it is not given."""
    try:
        return parse_priority(text or "")
    except ValueError as e:
        raise ValueError(f"--kernels: {e}") from None


def check_priority(priority: Mapping[str, Sequence[str]], who: str) -> None:
    """A ValueError, in the name of `who`, for an op or provider that is neither ours nor an installed plugin's."""
    load_plugins(())
    ops = all_ops()
    reject_unknown_providers(checked_priority(priority, who, ops), ops, who)


def reject_unknown_providers(named: Mapping[str, Sequence[str]], ops: Mapping[str, OpDeclaration], who: str) -> None:
    """A ValueError, in the name of `who`, for a provider that its op has not got."""
    for declared in ops.values():
        for name in named.get(declared.name, ()):
            reject_unknown_provider(declared, name, who)


def from_environment() -> dict[str, dict[str, list[str]]]:
    """The environment variable as a source."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    try:
        priority = parse_priority(text)
    except ValueError as e:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={text!r}: {e}") from e
    return {ENVIRONMENT_VARIABLE: checked_priority(priority, ENVIRONMENT_VARIABLE, all_ops())}


def checked_priority(
    priority: Mapping[str, Sequence[str]], who: str, ops: Mapping[str, OpDeclaration]
) -> dict[str, list[str]]:
    """The priority with lists of names; a ValueError for another type, an unknown op, or an unknown provider of "*"."""
    if not isinstance(priority, Mapping) or not all(isinstance(name, str) for name in priority):
        raise ValueError(f'{who}={priority!r}: must map ops to providers, for example {{"rms_norm": ["triton"]}}')
    checked = {}
    for name, providers in priority.items():
        try:
            reject_unknown(who, [name], ["*", *ops], ALL_OPS)
        except TypeError as e:
            raise ValueError(str(e).replace(" got an unknown argument", ": unknown op")) from None
        named = [providers] if isinstance(providers, str) else providers
        if not isinstance(named, Sequence) or not named or not all(isinstance(p, str) for p in named):
            expected = 'must be the names of providers, best first, for example ["triton"]'
            raise ValueError(f"{who}: {name!r} is given {providers!r}; {expected}")
        checked[name] = list(named)
        if name == "*":
            known = {p for declared in ops.values() for p in declared.providers}
            unknown = [p for p in checked[name] if p not in known]
            if unknown:
                providers = f"providers are {', '.join(sorted(known))}"
                raise ValueError(f"{who} names {unknown[0]!r}; {providers}; {unknown_provider_hint(unknown[0], known)}")
    return checked


def wanted_providers(declared: OpDeclaration, sources: Sources) -> tuple[str, Sequence[str]]:
    """(the first source that speaks of this op, what it names for it, best first)."""
    for who, named in sources.items():
        if declared.name in named:
            return who, named[declared.name]
        everywhere = [p for p in named.get("*", ()) if p in declared.providers]
        if everywhere:
            return who, everywhere
    return "", ()


def reject_unknown_provider(declared: OpDeclaration, name: str, who: str) -> None:
    """Raise a ValueError, in the name of `who`, if the op has no provider of this name."""
    if name not in declared.providers:
        unknown = f"{who} names {name!r}, but the providers of {declared.name!r} are {', '.join(declared.providers)}"
        failed = [f"plugin {p} failed: {r}" for p, r in failures().items()]
        raise ValueError("; ".join((unknown, *(failed or [unknown_provider_hint(name, declared.providers)]))))


def unknown_provider_hint(
    name: str, known: Iterable[str], by: str = "--kernel-plugin FILE, in Python 'kernel_plugins=[FILE]'"
) -> str:
    """What an unknown provider probably is: a misspelt one, or one of a plugin that was not named."""
    likely = did_you_mean(name, known)
    return f"{likely} A provider of yours needs {by}" if likely else f"a provider of yours needs {by}"
