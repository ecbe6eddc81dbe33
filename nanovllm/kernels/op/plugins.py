"""Kernels from outside the package: a Python file, a module, or an installed distribution.

A plugin is Python code that registers a provider for an op (`@rms_norm.provider("mine")`) or declares a new op (`@op`).
`LLM(kernel_plugins=["my_kernels.py"])` and `--kernel-plugin my_kernels.py` load one and prefer its providers. A file
whose text has changed since is taken back and loaded anew; what was chosen before keeps the old code. A distribution
can name modules in the entry-point group `nanovllm.kernels`: those are loaded always, and run where they are named
(`kernel_priority`, `NANOVLLM_KERNELS`). A plugin that fails to load is taken back whole. If the user named it, that is
an error; if it is installed, a warning, and a reason that `nanovllm kernels list` shows.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import linecache
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import SourceLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

from nanovllm.kernels.op import torch_library
from nanovllm.kernels.op.registry import LoadedPlugin, all_ops, loaded_plugins, registering, set_loaded, unregister

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "nanovllm.kernels"


def load_plugins(plugins: Sequence[str]) -> list[str]:
    """Load plugins that are not loaded yet or have changed, and installed ones; the names of those given. A warning
    says why an installed plugin could not be loaded.

    Args:
        plugins: paths of Python files, or names of modules.

    Raises:
        ValueError: one of `plugins` cannot be loaded; the message says which one, and why.
    """
    if isinstance(plugins, (str, Path)):
        plugins = [str(plugins)]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if not _load(entry.module, entry.load):  # under its module's name, which `plugins` may contain too
            logger.warning("kernel plugin %s: %s", entry.module, loaded_plugins()[entry.module].failure)
    names = []
    for plugin in map(str, plugins):
        is_file = plugin.endswith(".py")
        name = str(Path(plugin).expanduser().resolve()) if is_file else plugin
        run: Callable[[], object] = partial(_run_file, name) if is_file else partial(_import, plugin)
        if not _load(name, run, _hash(name) if is_file else None):
            raise ValueError(f"kernel plugin {name}: {loaded_plugins()[name].failure}")
        names.append(name)
    return names


def failures() -> Mapping[str, str]:
    """Plugins that could not be loaded, and why."""
    return MappingProxyType(
        {name: loaded.failure for name, loaded in loaded_plugins().items() if loaded.failure is not None}
    )


def _load(name: str, run: Callable[[], object], text_hash: str | None = None) -> bool:
    loaded = loaded_plugins().get(name)
    if loaded is None or loaded != LoadedPlugin(text_hash, None):
        if loaded is not None and loaded.failure is None:
            for op_name in unregister(name):
                torch_library.unregister(op_name)
        known, failure = set(all_ops()), None
        try:
            with registering(name):
                run()
            for op_name, declared in all_ops().items():
                if op_name not in known:
                    torch_library.register_or_warn(declared)
        except (Exception, SystemExit) as e:  # whatever a plugin's code raises
            failure = _what_failed(name, e)
        loaded = LoadedPlugin(text_hash, failure)
        set_loaded(name, loaded)
    return loaded.failure is None


def _what_failed(name: str, error: BaseException) -> str:
    """Why a plugin could not be loaded: the error, the line of the plugin's file, and what was probably meant."""
    if isinstance(error, FileNotFoundError) and error.filename == name:
        return "there is no such file"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        text += "; a file is named with its path and .py"
    elif isinstance(error, ImportError) and (missing := _NOT_THERE.match(str(error))) is not None:
        imported, module = missing.groups()
        text = f"{type(error).__name__}: {module} has no {imported!r}"
        if nearest := difflib.get_close_matches(imported, dir(sys.modules.get(module)), n=1):
            text += f"; did you mean {nearest[0]!r}?"
    elif isinstance(error, (NameError, AttributeError)):
        from nanovllm.kernels.testing.crash_report import remedy

        text += remedy(error)
    elif isinstance(error, KeyError) and (near := _ops_like(error.args)):
        text += f": there is no such op; did you mean {near}?"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
    if isinstance(error, SyntaxError) and error.filename == name and error.lineno is not None:
        text, lines = f"{type(error).__name__}: {error.msg}", [error.lineno]
    if not lines or lines[-1] is None:
        return text
    linecache.checkcache(name)  # the file may have changed since
    source = linecache.getline(name, lines[-1]).strip()
    return f"line {lines[-1]}{f', `{source}`' if source else ''}: {text}"


def _ops_like(key: tuple[object, ...]) -> str:
    """Ops whose names resemble a name that no op has; empty if none does."""
    name = str(key[0]) if key else ""
    # The key may be that of any dict of the plugin: a short one is part of many names.
    near = [op for op in all_ops() if len(name) > 4 and op.startswith(name)][:3]
    near = near or difflib.get_close_matches(name, all_ops(), n=1)
    return "" if name in all_ops() else " or ".join(map(repr, near))


_NOT_THERE = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def _hash(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # running the file gives the error
        return None


def _import(module: str) -> None:
    if not module or module.startswith(".") or os.sep in module:
        raise ValueError(f"{module!r} is neither a Python file, whose name ends in .py, nor the name of a module")
    importlib.import_module(module)


def _run_file(path: str) -> None:
    # The name must be one that no package has: Triton finds a kernel's source through its module.
    module_name = f"nanovllm_kernel_plugin_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and isinstance(spec.loader, SourceLoader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        # Not `exec_module`: its bytecode cache takes two texts of one size and second for the same.
        exec(spec.loader.source_to_code(Path(path).read_bytes(), path), module.__dict__)
    except BaseException:
        del sys.modules[module_name]
        raise
