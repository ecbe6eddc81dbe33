"""Memory for packed weights, in huge pages where Linux has them.

A decode step reads every weight once. With pages of 4 KiB the processor looks up an address for each of them, and stops
prefetching at its end. Linux gives pages of 2 MiB to whoever asks for them, if a mapping has such a piece. Most
matrices of a small model have none, so they share mappings.
"""

from __future__ import annotations

import mmap
import threading
from functools import cache

import torch

ALIGNMENT = 64
"""Bytes: a cache line, and what the kernels' vectors are."""


class WeightMemory:
    """Hands out pieces of mappings. A mapping is freed when all tensors in it are.

    Args:
        mapping: bytes of a mapping for several tensors. A tensor that takes a quarter of it or more has its own.
    """

    def __init__(self, mapping: int = 64 << 20) -> None:
        self._mapping = mapping
        self._free = torch.empty(0, dtype=torch.uint8)  # the rest of the newest mapping
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 [nbytes], aligned to `ALIGNMENT` bytes."""
        if nbytes >= self._mapping // 4:
            return _mapped(nbytes)
        with self._lock:
            if nbytes > len(self._free):
                self._free = _mapped(self._mapping)
            taken = self._free[:nbytes]
            self._free = self._free[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
            return taken


def _mapped(nbytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # Linux was built without huge pages
        pass
    return torch.frombuffer(mapping, dtype=torch.uint8)


@cache
def weight_memory() -> WeightMemory:
    """The memory of this process's weights."""
    return WeightMemory()
