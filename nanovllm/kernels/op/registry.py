"""The registry: every op that is declared, and the plugins, which declare ops or register providers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.early_exit import is_interactive

if TYPE_CHECKING:
    from nanovllm.kernels.op.dispatch import Op
    from nanovllm.kernels.op.provider import Provider


class LoadedPlugin(NamedTuple):
    """A plugin that was loaded, or that failed to load."""

    text_hash: str | None
    """Of its file; None: it is a module."""
    failure: str | None
    """Why loading it failed; None: it did not."""


# Code is imported once a process, so this is kept for the process too.
_OPS: dict[str, Op] = {}
_PLUGINS: dict[str, LoadedPlugin] = {}
# The plugin that is being loaded: what registers meanwhile belongs to it.
_plugin: ContextVar[str | None] = ContextVar("the plugin that is being loaded", default=None)


def current_plugin() -> str | None:
    """The plugin that is being loaded."""
    return _plugin.get()


def all_ops() -> Mapping[str, Op]:
    """Every declared op by name. Importing `nanovllm.kernels` declares those of the package."""
    return MappingProxyType(_OPS)


def loaded_plugins() -> Mapping[str, LoadedPlugin]:
    """Every plugin that was loaded or failed to load, by name."""
    return MappingProxyType(_PLUGINS)


def set_loaded(name: str, plugin: LoadedPlugin) -> None:
    """Remember that a plugin was loaded or failed to load."""
    _PLUGINS[name] = plugin


def add_op(declared: Op) -> None:
    """Register an op; a ValueError if there is one of its name.

    At a prompt and in a notebook it replaces one that was defined there, without the providers of that one.
    """
    known = _OPS.get(declared.name)
    at_prompt = [o is not None and o.origin is None and o.native.__module__ == "__main__" for o in (known, declared)]
    if known is not None and not (all(at_prompt) and is_interactive()):
        origin = _OPS[declared.name].origin
        raise ValueError(f"op {declared.name!r} is declared twice" + (f", before by {origin}" if origin else ""))
    _OPS[declared.name] = declared


@contextmanager
def registering(plugin: str) -> Iterator[None]:
    """Within the block, what is registered belongs to a plugin; if the block raises, it is taken back."""
    before = _registered()
    token = _plugin.set(plugin)
    try:
        yield
    except BaseException:
        _restore(before)
        raise
    finally:
        _plugin.reset(token)


@contextmanager
def temporary() -> Iterator[None]:
    """Whatever is registered within the block is taken back at its end; plugins loaded in it count as not loaded."""
    before, plugins = _registered(), dict(_PLUGINS)
    try:
        yield
    finally:
        _restore(before)
        _PLUGINS.clear()
        _PLUGINS.update(plugins)


def _registered() -> dict[str, tuple[Op, dict[str, Provider]]]:
    return {name: (o, dict(o.providers)) for name, o in _OPS.items()}


def _restore(before: Mapping[str, tuple[Op, dict[str, Provider]]]) -> None:
    _OPS.clear()
    for name, (o, providers) in before.items():
        _OPS[name] = o
        o.providers.clear()
        o.providers.update(providers)
        o.resolved_calls.clear()


def unregister(plugin: str) -> list[str]:
    """Take back what a loaded plugin registered; the names of the ops that it had declared."""
    del _PLUGINS[plugin]  # first, since Ctrl-C may end loading it again
    declared = [name for name, o in _OPS.items() if o.origin == plugin]
    for name in declared:
        del _OPS[name]
    for o in _OPS.values():
        for name in [p.name for p in o.providers.values() if p.origin == plugin]:
            del o.providers[name]
        o.resolved_calls.clear()
    return declared
