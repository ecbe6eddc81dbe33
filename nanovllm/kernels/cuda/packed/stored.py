"""A packed weight as the kernels take it: its kind of storage, and where the parts of a row lie."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from nanovllm.kernels.cuda.packed.packed_cuda_plan import ScalePlane
from nanovllm.kernels.ops.gguf_blocks import GGUFType, check_gguf
from nanovllm.kernels.ops.linear_int4 import group_size
from nanovllm.kernels.triton.launch_arguments import adjacent

GROUP = 128
"""Columns that share a scale of int4 and int8, or a multiple of them."""
_SCALE_BYTES = {"d": 2, "m": 2, "sc": 1, "mn": 1}
"""Of a number of the planes of scales and minima."""
_ALL = 31
"""The shift of step numbers of weights whose rows have one scale."""


class KernelStorage(IntEnum):
    """How a weight is stored, as `Storage` of packed.cuh."""

    INT4, INT4_ZERO, INT8, INT8_ZERO, PLANES4, PLANES4_MINIMUM, PLANES8, PLANES8_MINIMUM, Q4_K, Q5_K, Q6_K = range(11)


@dataclass(frozen=True)
class KernelWeight:
    """A weight as the kernel takes it."""

    storage: KernelStorage
    bits: int
    codes: torch.Tensor  # uint8 [rows, bytes]
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    step_shift: int = 0
    middle: int = 0
    planes: tuple[int, int, int, int] = (0, 0, 0, 0)  # of d, m (Q6_K: qh), sc and mn in a row
    scales: tuple[ScalePlane | None, ...] = ()  # the same four; of int4 the first is that of the groups
    section_start: int = 0  # where the first of the four begins in a row that ends with them
    section: tuple[int, ...] = ()  # where each begins behind that, and the bytes to the end of the row

    @property
    def kind(self) -> str:
        """The plans' name of the storage: "int4", or that of `KernelStorage`."""
        return "int4" if self.storage == KernelStorage.INT4 else self.storage.name


def affine(
    size: int, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> KernelWeight | None:
    """Of integers of 4 or 8 bits in groups; None: the kernels do not take their size."""
    group = group_size(size, scale)
    groups = group // GROUP
    if scale.dtype not in (torch.float16, dtype) or (group != size and (group % GROUP or groups & (groups - 1))):
        return None
    scale = adjacent(scale)
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()  # the kernel reads both at the same places
    steps = groups * bits // 4  # of a group
    shift = _ALL if group == size else steps.bit_length() - 1
    first = KernelStorage.INT4 if bits == 4 else KernelStorage.INT8
    storage = KernelStorage(first + (zero is not None))
    middle = 2 ** (bits - 1) if zero is None else 0
    return KernelWeight(
        storage, bits, weight, scale, zero, shift, middle, scales=(ScalePlane(2, shift), None, None, None)
    )


def planes_of(size: int, weight: torch.Tensor, kind: str) -> KernelWeight | None:
    """Of GGUF's blocks; None: they are not planes."""
    of, planes = check_gguf(weight, kind, size)
    if not planes:
        return None
    offsets = of.plane_offsets(size)[0]
    d, m, sc, mn = (offsets.get(name, 0) for name in _SCALE_BYTES)
    scales = tuple(_scale_plane(of, name) if name in of.planes else None for name in _SCALE_BYTES)
    m = offsets.get("qh", m)
    start = min(at for name, at in offsets.items() if name in _SCALE_BYTES)
    section = (*(max(at - start, 0) for at in (d, m, sc, mn)), weight.shape[1] - start)
    return KernelWeight(
        _storage(of), of.bits, weight, middle=of.zero, planes=(d, m, sc, mn), scales=scales, section_start=start,
        section=section,
    )  # fmt: skip


def _scale_plane(of: GGUFType, name: str) -> ScalePlane:
    bytes_each = _SCALE_BYTES[name]
    columns = of.block_size * bytes_each // of.planes[name]  # of a number; a step has 512 / bits
    return ScalePlane(bytes_each, (columns * of.bits).bit_length() - 10)


def _storage(of: GGUFType) -> KernelStorage:
    if "sc" in of.planes:
        return KernelStorage[of.name]
    return KernelStorage[f"PLANES{of.bits}{'_MINIMUM' if 'm' in of.planes else ''}"]
