"""What the attention libraries have in common: finding them without importing them, and what they cannot take."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nanovllm.kernels.ops.paged_kv import PagedKV


def find(package: str) -> ModuleSpec | None:
    """A top-level package, without importing it; None if it is not installed."""
    try:
        return importlib.util.find_spec(package)
    except ValueError:  # somebody has put a module without origin in its place
        return None


def folder(package: str) -> Path | None:
    """Where a top-level package lies, without importing it; None if it is not installed."""
    spec = find(package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def version_of(*distributions: str) -> str:
    """The version of the first of these distributions that is installed, or "of unknown version"."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return "of unknown version"


@cache
def import_error(module: str, names: Sequence[str]) -> str | None:
    """Why these names of a module cannot be had, by importing it: "ImportError: ..."; None if they can."""
    try:
        found = importlib.import_module(module)
        for name in names:
            getattr(found, name)
    except (Exception, SystemExit) as e:  # whatever a damaged or mismatched installation raises
        return " ".join(f"{type(e).__name__}: {e}".split())
    return None


def refuse_common(name: str, q: torch.Tensor, kv: PagedKV) -> str | None:
    """What none of the libraries takes the way that we call it: scales, other dtypes, rows that are not adjacent."""
    if kv.k_cache.dtype != q.dtype:
        return f"{name} needs a cache of the queries' dtype, got {_short(kv.k_cache)} beside {_short(q)}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{name} takes float16 and bfloat16, got {_short(q)}"
    if kv.k_scale is not None or kv.v_scale is not None:
        return f"{name} takes scales only for a float8 cache and float8 queries"
    if kv.k_cache.stride(3) != 1 or (kv.block_table.shape[1] > 1 and kv.block_table.stride(1) != 1):
        return f"{name} needs adjacent elements in head_dim and in the rows of block_table"
    return None


def raise_if(reason: str | None) -> None:
    """ValueError, if there is a reason for one."""
    if reason is not None:
        raise ValueError(reason)


def _short(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
