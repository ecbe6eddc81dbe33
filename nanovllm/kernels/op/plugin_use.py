"""Which of its providers a plugin has in use, and why not the others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from nanovllm.console import warn
from nanovllm.kernels.op.declaration import OpDeclaration
from nanovllm.kernels.op.provider import Provider
from nanovllm.kernels.op.registry import all_ops

logger = logging.getLogger(__name__)

NOTHING_REGISTERED = "it registers no provider and declares no op; write @OP.provider('NAME') above your function"


def registered_by(plugin: str) -> list[tuple[OpDeclaration, Provider]]:
    """The providers of a plugin, and those of its ops."""
    return [(o, p) for o in all_ops().values() for p in o.providers.values() if plugin in (p.origin, o.origin)]


def why_plugins_cannot_run(plugins: Collection[str], device: torch.device, declared: OpDeclaration) -> str | None:
    """That plugins have providers of an op which cannot run on a device, and why; None: they have none."""
    reasons = [(p.name, p.support(device)) for p in declared.providers.values() if p.origin and p.origin in plugins]
    cannot = [f"{name}, which is preferred as it is a plugin's, cannot run here: {why}" for name, why in reasons if why]
    return "; ".join(cannot) or None


def warn_if_it_serves_nothing(
    plugin: str, device: torch.device, use_custom_kernels: bool, chosen: Mapping[str, Provider],
    named: Mapping[str, Sequence[str]],
) -> None:  # fmt: skip
    """Warn of a plugin that was named, if no op runs a provider of it, with the reasons.

    Args:
        chosen: op -> the provider that runs it.
        named: op -> the providers that the user named for it.
    """
    registered = registered_by(plugin)
    if any(chosen[declared.name] is provider for declared, provider in registered):
        return
    what = "serves no op"
    if not registered:
        reasons = [NOTHING_REGISTERED]
    elif not use_custom_kernels:
        reasons = ["use_custom_kernels=False selects the reference of every op"]
    else:
        reasons = []
        against = [provider.support(device) for _, provider in registered]
        for (declared, provider), reason in zip(registered, against):
            name = chosen[declared.name].name
            reason = reason or (
                f"you named `{name}` for it" if name in named[declared.name] else f"{name} was selected"
            )
            reasons.append(f"{declared.name}, {provider.name}: {reason}")
        what = "has no kernel that can run here" if all(against) else what
    warn(logger, f"kernel plugin {plugin} {what}: {'; '.join(reasons)}")
