"""Fixtures that tests of ops and plugins share."""

import sys
from pathlib import Path

import pytest

from nanovllm.kernels.op import plugins, registry


@pytest.fixture(autouse=True)
def restored():
    """What a test registers is taken back after it."""
    with registry.temporary():
        yield


@pytest.fixture
def untouched(monkeypatch):
    """Whatever a test registers or loads is forgotten after it; no plugin that is installed here takes part."""
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("nanovllm_kernel_plugin_", "plugin_module")):
            del sys.modules[name]


@pytest.fixture
def plugin(tmp_path):
    """Writes a plugin file and gives its path."""

    def write(text: str, name: str = "my_kernels.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a plugin module that can be imported, and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(text: str, name: str = "plugin_module") -> str:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture
def installed(module, monkeypatch):
    """Installs a distribution that names a plugin module, as pip would have it on disk."""
    from importlib.metadata import entry_points

    def install(text: str, value: str = "plugin_module") -> str:
        name = module(text)
        info = Path(sys.path[0]) / "plugin_distribution-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-distribution\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nanovllm.kernels]\nfrom_the_plugin = {value}\n")
        monkeypatch.setattr(plugins, "entry_points", entry_points)
        return name

    return install
