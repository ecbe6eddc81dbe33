"""The bytes that PyTorch's operations move, counted without running them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if written and not is_view and "empty" not in func._schema.name:
            read = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
            self.operations += 1
            self.bytes += sum(map(_distinct_bytes, (*read, *written)))
        return out


def torch_traffic(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[int, int]:
    """(bytes, operations): what an eager call reads and writes if no operation finds anything in a cache.

    Args:
        args: only their shapes and dtypes count. Nothing is computed.
    """
    counter = _Counter()
    with torch.inference_mode(), counter:
        fn(*(torch.empty_like(a, device="meta") for a in args))
    return counter.bytes, counter.operations


def _distinct_bytes(t: torch.Tensor) -> int:
    """A broadcast tensor is read once, however often it is used."""
    return t.element_size() * prod(size for size, stride in zip(t.shape, t.stride()) if stride)
