"""What `pip install -e` of a clone makes importable."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path):
    """The clone's folder has the package's name, and no `__init__.py`: Python could take it for a namespace package."""
    pytest.importorskip("setuptools", minversion="77")
    clone, wheels, site = tmp_path / "nanovllm", tmp_path / "wheels", tmp_path / "site"
    (clone / "nanovllm").mkdir(parents=True)
    (clone / "nanovllm" / "__init__.py").write_text("")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    wheels.mkdir()
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(wheels)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(site)

    script = f"import site; site.addsitedir({str(site)!r}); import nanovllm; print(nanovllm.__file__)"
    # without this environment's own packages
    done = subprocess.run([sys.executable, "-S", "-E", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(clone / "nanovllm" / "__init__.py"), done.stderr
