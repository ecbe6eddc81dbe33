"""What the Gluon kernels share: names that changed after Triton 3.6, and descriptors for the copy engine.

Imported where a Gluon kernel is: Gluon is not in every Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
warps_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@dataclass(frozen=True)
class _Address:
    """What a descriptor asks of a tensor, without the tensor, whose memory a kept descriptor would hold on to."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


# Triton checks a new one for 3 us; a model has a few for every layer.
@functools.lru_cache(maxsize=4096)
def descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """For the copy engine: boxes of a 16-bit tensor, in shared memory as tensor cores read them.

    A box's last dimension has 32 elements, lines of 64 bytes, or a multiple of 64, lines of 128.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * box[-1]), element_bitwidth=16, rank=len(box))
    return TensorDescriptor(_Address(address, dtype), list(shape), list(strides), list(box), layout)
