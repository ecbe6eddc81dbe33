"""What decides how fast a kernel is, besides the device: the versions of libraries and the commit of this code."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nanovllm.hardware.gpu_name import cpu_name


def versions() -> dict[str, str]:
    """torch and triton, without local build suffixes, and the CUDA that torch was built for ("none" on a CPU build)."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"torch": torch.__version__.partition("+")[0], "triton": triton, "cuda": torch.version.cuda or "none"}


def environment() -> dict[str, str]:
    """What a bug report has of the machine: `versions`, with torch's build, and those of the rest of the software."""
    found = {"nanovllm": "", "transformers": ""}
    for name in found:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    if torch.version.cuda is None and torch.version.hip is None:
        build = f"{torch.__version__} (CPU build)"
    else:
        build = torch.__version__
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        **found, **versions(), "torch": build, "python": platform.python_version(), "system": platform.platform(),
        "processor": cpu_name(), **gpu,
    }  # fmt: skip


@dataclass
class Provenance:
    """When something was measured, and with which code.

    Attributes:
        date: in UTC, to the minute.
        commit: the commit of the checkout; "unknown" outside of one.
        dirty: whether tracked files other than results differ from the commit.
        versions: see `versions`.
    """

    date: str
    commit: str
    dirty: bool
    versions: dict[str, str]


def provenance(root: Path) -> Provenance:
    """The provenance of what is measured now with the checkout at `root`."""

    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.rstrip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    return Provenance(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        commit=git("rev-parse", "--short=10", "HEAD") or "unknown",
        # A file of results that was measured into does not make the code another one.
        dirty=any(not line[3:].startswith("results/") for line in changed),
        versions=versions(),
    )
