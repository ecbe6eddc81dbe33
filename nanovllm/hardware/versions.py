"""What decides how fast a kernel is, besides the device: the versions of libraries and the commit of this code."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """torch and triton, without local build suffixes, and the CUDA that torch was built for ("none" on a CPU build)."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"torch": torch.__version__.partition("+")[0], "triton": triton, "cuda": torch.version.cuda or "none"}


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
