"""The versions that decide how fast a kernel is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """torch and triton, without local build suffixes, and the CUDA that torch was built for ("none" on a CPU build)."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"torch": torch.__version__.partition("+")[0], "triton": triton, "cuda": torch.version.cuda or "none"}
