"""Kernels from outside the package: a Python file, a module, or an installed distribution.

A plugin is Python code that registers a provider for an op (`@rms_norm.provider("mine")`) or declares a new op (`@op`).
`LLM(kernel_plugins=["my_kernels.py"])` and `--kernel-plugin my_kernels.py` load one and prefer its providers. A
distribution can name modules in the entry-point group `nanovllm.kernels`: those are loaded always, and run where they are
named (`kernel_priority`, `NANOVLLM_KERNELS`). A plugin that fails to load is taken back whole; its error becomes a reason
that `nanovllm kernels list` shows.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

from nanovllm.kernels.registry import all_ops, registering

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "nanovllm.kernels"

# Code is imported once a process, hence what came of it is kept for the process too.
_loaded: dict[str, str | None] = {}


def load_plugins(plugins: Sequence[str]) -> list[str]:
    """Load what is not yet loaded, installed plugins too; the names of those of `plugins` that could be loaded.

    Args:
        plugins: paths of Python files, or names of modules.
    """
    if isinstance(plugins, (str, Path)):
        plugins = [str(plugins)]
    all_ops()  # first, so that a plugin that imports an op does not load the package's own as its own
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        _load(entry.module, entry.load)  # by its module's name, so that `plugins` can ask for it too
    names = []
    for plugin in map(str, plugins):
        is_file = plugin.endswith(".py")
        name = str(Path(plugin).expanduser().resolve()) if is_file else plugin
        if _load(name, lambda: _run_file(name) if is_file else importlib.import_module(plugin)):  # noqa: B023
            names.append(name)
    return names


def failures() -> Mapping[str, str]:
    """Plugins that could not be loaded, and why."""
    return MappingProxyType({name: reason for name, reason in _loaded.items() if reason is not None})


def _load(name: str, run: Callable[[], object]) -> bool:
    if name not in _loaded or _loaded[name] is not None:
        known = set(all_ops())
        try:
            with registering(name):
                run()
            _loaded[name] = None
            from nanovllm.kernels import library

            for op_name, declared in all_ops().items():
                if op_name not in known:
                    library.register_or_warn(declared)
        except (Exception, SystemExit) as e:  # whatever a stranger's code raises
            _loaded[name] = f"{type(e).__name__}: {e}"
            if isinstance(e, ModuleNotFoundError) and e.name == name:
                _loaded[name] += "; a file is named with its path and .py"
            logger.warning("kernel plugin %s: %s", name, _loaded[name])
    return _loaded[name] is None


def _run_file(path: str) -> None:
    # The name must be one that no package has: Triton finds a kernel's source through its module.
    module_name = f"nanovllm_kernel_plugin_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
