"""Catches kernels that leave outputs unwritten or write past them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GUARD = 64  # elements after each allocation
_FACTORIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class MemoryGuard(TorchDispatchMode):
    """Within the block, uninitialised memory is poisoned: NaN, or the largest integer. What lies after it must stay so.

    Sees allocations by C++ code too, since they go through the dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or out.layout != torch.strided or not out.numel():
            return out
        extent = 1 + sum((n - 1) * stride for n, stride in zip(out.shape, out.stride()))
        memory = torch.full((extent + _GUARD,), _poison(out.dtype), device=out.device).to(out.dtype)
        self._guards.append(memory[extent:])
        return memory.as_strided(out.shape, out.stride())

    def check(self) -> str | None:
        """None, or what was written where nothing should be."""
        for guard in self._guards:
            intact = guard.isnan() if guard.is_floating_point() else guard == _poison(guard.dtype)
            if not bool(intact.all()):
                where = int((~intact).nonzero()[0])
                return f"wrote past the end of a {guard.dtype} allocation, {where + 1} elements after its last"
        return None


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
