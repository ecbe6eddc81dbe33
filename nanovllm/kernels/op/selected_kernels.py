"""The provider that was selected for each op: what layers call, and how users see it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from html import escape
from types import MappingProxyType
from typing import Any

from nanovllm.kernels.op.availability import is_triton_support
from nanovllm.kernels.op.provider import NATIVE, KernelError, Provider, add_note
from nanovllm.wording import counted


class Kernels:
    """The resolved choice: `kernels.rms_norm` is the function that was selected for that op.

    Args:
        chosen: op -> (the provider that was selected, the function to call).

    Attributes:
        providers: op -> the name of its provider.
    """

    def __init__(self, chosen: Mapping[str, tuple[Provider, Callable[..., Any]]]) -> None:
        self._chosen = dict(chosen)
        self.providers: Mapping[str, str] = MappingProxyType({op: p.name for op, (p, _) in self._chosen.items()})

    def provider(self, op: str) -> Provider:
        """The provider that was selected for an op, which says what it can do: `capturable`, `takes_out` and so on."""
        return self._chosen[op][0]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        chosen = self.__dict__.get("_chosen", {})
        if name not in chosen:
            raise AttributeError(f"no op {name!r}; ops are {', '.join(sorted(chosen))}")
        return chosen[name][1]

    def __str__(self) -> str:
        """One line a provider: its name and its ops. Of `native`, the reference, only their number."""
        groups = self._groups()
        width = max(map(len, groups)) + 2
        lines = [
            textwrap.fill(", ".join(ops), 80, initial_indent=f"{provider:{width}}", subsequent_indent=" " * width,
                          break_long_words=False)
            for provider, ops in groups.items() if provider != NATIVE
        ]  # fmt: skip
        if count := len(groups.get(NATIVE, ())):
            noun = "other op" if lines else "op"
            lines.append(f"{NATIVE:{width}}{counted(count, noun)}: PyTorch references")
        return "\n".join([*lines, "`.providers` names the provider of every op."])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks; the ops of `native` are listed at a click."""
        rows = ""
        for provider, ops in self._groups().items():
            listed = escape(", ".join(ops))
            if provider == NATIVE:
                listed = f"<details><summary>{len(ops)} PyTorch references</summary>{listed}</details>"
            rows += f"<tr><td>{escape(provider)}</td><td style='text-align: left'>{listed}</td></tr>"
        return f"<table><tr><th>provider</th><th style='text-align: left'>ops</th></tr>{rows}</table>"

    def summary(self) -> str:
        """The providers in use, `native` last, for example "cpu (decoder_step, sample), native (43 ops)"."""
        return ", ".join(
            f"{provider} ({', '.join(ops) if len(ops) <= 2 and provider != NATIVE else counted(len(ops), 'op')})"
            for provider, ops in self._groups().items()
        )

    def interpreted(self) -> list[str]:
        """The ops of Triton kernels that run in Triton's interpreter if the device is a CPU, with their providers."""
        named = ((op, p) for op, (p, _) in self._chosen.items())
        return [f"{op} ({p.name})" for op, p in named if is_triton_support(p.support)]

    def name_plugins(self, error: Exception) -> None:
        """Below an error's message, name the plugins that run: a wrong shape or dtype of theirs may be the cause.

        A `KernelError` says where the kernel failed, so the frames of the layers that called it are left out.
        """
        foreign = [(op, p) for op, (p, _) in self._chosen.items() if p.origin is not None]
        if foreign:
            named = "; ".join(f"{op} by {p.name}, of {p.origin}" for op, p in foreign)
            commands = (f"`nanovllm kernels verify {op} --kernel-plugin {p.origin}`" for op, p in foreign)
            how = f"Compare the results with the reference: {', '.join(commands)}"
            add_note(error, f"This engine runs kernels of yours: {named}. {how}")
            if isinstance(error, KernelError):
                error.__traceback__ = None

    def _groups(self) -> dict[str, list[str]]:
        """provider -> its ops, most ops first, but `native` last."""
        groups: dict[str, list[str]] = {}
        for op, provider in sorted(self.providers.items()):
            groups.setdefault(provider, []).append(op)
        return dict(sorted(groups.items(), key=lambda group: (group[0] == NATIVE, -len(group[1]), group[0])))
