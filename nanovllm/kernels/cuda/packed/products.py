"""The ops `linear_int4`, `linear_int8` and `linear_gguf`, and those that combine them with what follows.

The kernels take up to 16 tokens, of int4 on Hopper 128, and weights that they can read 16 bytes at a time: see
`kernel_weight`. 8-bit floats have a kernel of their own, and all other calls go to the provider `triton`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from nanovllm.kernels.cuda.fp8 import products as fp8
from nanovllm.kernels.cuda.packed.library import fp8_support, product_kernel
from nanovllm.kernels.cuda.packed.plan import (
    BOX_FRAGMENTS,
    MAX_TOKENS,
    WARP_ROWS,
    WIDE_TOKENS,
    PackedCudaPlan,
    ScalePlane,
    box_shared_bytes,
    box_tiles,
    phases_of,
    plan_boxes,
    plan_packed_cuda,
    plan_ring,
    plan_wide,
    turns_of_a_phase,
    wide_shared_bytes,
)
from nanovllm.kernels.ops.gguf_blocks import GGUFType, check_gguf
from nanovllm.kernels.ops.linear_int4 import group_size
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton.gemm import packed_products
from nanovllm.kernels.triton.gemm.fp8_product import has_99_kib
from nanovllm.kernels.triton.gemm.sum_norm import sum_add_rms_norm
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, num_sms
from nanovllm.kernels.triton.rows.activation import silu_and_mul

_GROUP = 128
_SCALE_BYTES = {"d": 2, "m": 2, "sc": 1, "mn": 1}
"""Of a number of the planes of scales and minima."""
_ALL = 31
"""The shift of step numbers of weights whose rows have one scale."""


class _Storage(IntEnum):
    """As in packed.cuh."""

    INT4, INT4_ZERO, INT8, INT8_ZERO, PLANES4, PLANES4_MINIMUM, PLANES8, PLANES8_MINIMUM, Q4_K, Q5_K, Q6_K = range(11)


@dataclass(frozen=True)
class KernelWeight:
    """A weight as the kernel takes it."""

    storage: _Storage
    bits: int
    codes: torch.Tensor  # uint8 [rows, bytes]
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    step_shift: int = 0
    middle: int = 0
    planes: tuple[int, int, int, int] = (0, 0, 0, 0)  # of d, m, sc and mn in a row
    scales: tuple[ScalePlane | None, ...] = ()  # the same four; of int4 the first is that of the groups


@functools.cache
def _has_wide(device: torch.device) -> bool:
    """Whether the kernel of wide.cuh runs: its instructions are those of compute capability 9.0 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _wide(x: torch.Tensor) -> bool:
    """Whether rows of bytes can be read 16 bytes at a time, at places of 32 bits."""
    return x.stride(1) == 1 and not x.stride(0) % 16 and not x.data_ptr() % 16 and x.shape[0] * x.stride(0) < 1 << 32


def _affine(
    size: int, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> KernelWeight | None:
    group = group_size(size, scale)
    groups = group // _GROUP
    if scale.dtype not in (torch.float16, dtype) or (group != size and (group % _GROUP or groups & (groups - 1))):
        return None
    scale = adjacent(scale)
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()  # the kernel reads both at the same places
    steps = groups * bits // 4  # of a group
    shift = _ALL if group == size else steps.bit_length() - 1
    first = _Storage.INT4 if bits == 4 else _Storage.INT8
    storage = _Storage(first + (zero is not None))
    middle = 2 ** (bits - 1) if zero is None else 0
    return KernelWeight(
        storage, bits, weight, scale, zero, shift, middle, scales=(ScalePlane(2, shift), None, None, None)
    )


def _planes(size: int, weight: torch.Tensor, kind: str) -> KernelWeight | None:
    of, planes = check_gguf(weight, kind, size)
    if not planes:
        return None
    offsets = of.plane_offsets(size)[0]
    d, m, sc, mn = (offsets.get(name, 0) for name in _SCALE_BYTES)
    scales = tuple(_scale_plane(of, name) if name in of.planes else None for name in _SCALE_BYTES)
    return KernelWeight(_storage(of), of.bits, weight, middle=of.zero, planes=(d, m, sc, mn), scales=scales)


def _scale_plane(of: GGUFType, name: str) -> ScalePlane:
    bytes_each = _SCALE_BYTES[name]
    columns = of.block_size * bytes_each // of.planes[name]  # of a number; a step has 512 / bits
    return ScalePlane(bytes_each, (columns * of.bits).bit_length() - 10)


def _storage(of: GGUFType) -> _Storage:
    if "sc" in of.planes:
        return _Storage[of.name]
    return _Storage[f"PLANES{of.bits}{'_MINIMUM' if 'm' in of.planes else ''}"]


def kernel_weight(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    sums: bool = False,
) -> KernelWeight | None:  # fmt: skip
    """The weight if a kernel takes this call: 1 to 16 tokens of 16 bits (of int4 on Hopper up to 128, if there is a
    plan), columns a multiple of 128, and groups of 128 times a power of two, or a whole row. With GGUF's planes x is
    bfloat16, in which scaled weights are rounded.
    """
    check_storage(storage, scale)
    size = x.shape[-1]
    if storage == "fp8" or x.dtype not in (torch.float16, torch.bfloat16) or not size or size % _GROUP:
        return None
    tokens = x.numel() // size
    wide = storage == "int4" and MAX_TOKENS < tokens <= WIDE_TOKENS and _has_wide(x.device)
    wide = wide and plan_wide(weight.shape[0], size // _GROUP, tokens, num_sms(x), sums) is not None
    if not (0 < tokens <= MAX_TOKENS or wide) or not _wide(weight):
        return None
    if scale is None:
        return _planes(size, weight, storage) if x.dtype == torch.bfloat16 else None
    bits = 4 if storage == "int4" else 8
    if weight.shape[1] * 8 != size * bits:
        return None  # the other provider says what is wrong
    return _affine(size, weight, scale, zero, bits, x.dtype)


def _takes_ring(w: KernelWeight, x: torch.Tensor, tokens: int) -> bool:
    """Whether the kernel of ring.cuh is a choice. Rows of int4's scales have to begin at multiples of 16 bytes."""
    if w.storage in (_Storage.Q4_K, _Storage.Q6_K):
        return True
    if w.storage != _Storage.INT4 or w.scale is None or x.dtype != torch.bfloat16 or tokens > 8:
        return False
    return not w.scale.stride(0) % 8 and not w.scale.data_ptr() % 16


def takes_boxes(w: KernelWeight, x: torch.Tensor, tokens: int) -> bool:
    """Whether the kernel of box.cuh is a choice: one token on Hopper, else as that of ring.cuh, and groups of 128
    columns, two at a time.
    """
    if w.storage != _Storage.INT4 or tokens != 1 or w.step_shift or x.shape[-1] % 256 or not _has_wide(x.device):
        return False
    return _takes_ring(w, x, tokens)


def plan_of(w: KernelWeight, x: torch.Tensor, rows: int, tokens: int, gated: bool, sums: bool) -> PackedCudaPlan:
    groups = x.shape[-1] // _GROUP
    if tokens > MAX_TOKENS:
        wide = plan_wide(rows, groups, tokens, num_sms(x), sums)
        assert wide is not None  # `kernel_weight` has asked
        return wide
    boxes = plan_boxes(rows, groups, num_sms(x), gated) if takes_boxes(w, x, tokens) else None
    ring = None
    if boxes is None and _takes_ring(w, x, tokens):
        kind = "int4" if w.storage == _Storage.INT4 else w.storage.name
        ring = plan_ring(kind, rows, groups, tokens, num_sms(x), sums, has_99_kib(x.device))
    return boxes or ring or plan_packed_cuda(rows, groups, num_sms(x), sums)


def run_product(
    x: torch.Tensor, w: KernelWeight, bias: torch.Tensor | None, gated: bool = False, sums: bool = False,
    plan: PackedCudaPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """[tokens, rows]; gated: [tokens, rows / 2]; sums: float32 [splits, tokens, rows]. plan: replaces the one made."""
    x, _, stride = matrix_of(x)
    if stride % 8 or x.data_ptr() % 16 or stride < x.shape[-1]:
        x = x.clone(memory_format=torch.contiguous_format)
        stride = x.shape[-1]
    (rows, _), size = w.codes.shape, x.shape[-1]
    tokens = x.numel() // size
    columns = 512 // w.bits  # of a step
    plan = plan or plan_of(w, x, rows, tokens, gated, sums)
    steps, group_steps = size // columns, _GROUP // columns
    split_steps = cdiv(size // _GROUP, plan.splits) * group_steps
    splits = cdiv(steps, split_steps)
    boxes = plan.fragments == BOX_FRAGMENTS
    column_warps = plan.warps if boxes else plan.warps // plan.row_warps
    turns = cdiv(split_steps, column_warps)
    panel: tuple[int, ...] = (0,) * 5
    if boxes:
        phase, shared_bytes = plan.stages, box_shared_bytes(plan, box_tiles(rows, gated))
    elif plan.stages:
        phase, shared_bytes = plan.stages, wide_shared_bytes(plan, tokens)
    elif plan.fragments:
        phases = phases_of(plan, turns, tokens, columns, w.scales)
        phase, panel, shared_bytes = phases.turns, phases.panel, phases.shared_bytes
    else:
        phase = turns_of_a_phase(turns, tokens * column_warps * columns * 2)
        of_x = tokens * phase * column_warps * columns * 2
        shared_bytes = max(of_x, (column_warps - 1) * plan.row_warps * WARP_ROWS * 8 * cdiv(tokens, 8) * 4)
    if sums:
        y = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    else:
        y = torch.empty((tokens, rows // (1 + gated)), dtype=x.dtype, device=x.device)
    scale_stride = 0 if w.scale is None else w.scale.stride(0)
    numbers = (
        stride, w.codes.stride(0), scale_stride, *w.planes, tokens, rows, steps, split_steps, phase, plan.row_warps,
        w.step_shift, w.middle, gated, sums, *panel, splits, plan.warps, shared_bytes, plan.fragments,
    )  # fmt: skip
    product_kernel(x.device)(w.storage, x, w.codes, w.scale, w.zero, adjacent(bias), y, numbers)
    return y


def _product(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    bias: torch.Tensor | None, otherwise: Callable[..., torch.Tensor], *arguments: Any,
) -> torch.Tensor:  # fmt: skip
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"bias: expected {x.dtype}, as x, not {bias.dtype}")
    w = kernel_weight(x, storage, weight, scale, zero)
    if w is None:
        return otherwise(x, weight, *arguments, bias)
    return run_product(x, w, bias).view(*x.shape[:-1], weight.shape[0])


def linear_int4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_int4`."""
    return _product(x, "int4", weight, scale, zero, bias, packed_products.linear_int4, scale, zero)


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_int8`."""
    return _product(x, "int8", weight, scale, zero, bias, packed_products.linear_int8, scale, zero)


def linear_gguf(x: torch.Tensor, weight: torch.Tensor, kind: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op `linear_gguf`."""
    return _product(x, kind, weight, None, None, bias, packed_products.linear_gguf, kind)


def _takes_fp8(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """As `fp8.takes`; the kernel's library is another than this folder's, for which the provider was selected."""
    return fp8.takes(x, weight, gated) and _has_fp8(x.device)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return fp8_support(device) is None


def linear_packed_silu_and_mul(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None
) -> torch.Tensor:
    """The op `linear_packed_silu_and_mul`."""
    if storage == "fp8" and scale is not None and _takes_fp8(x, weight, gated=True):
        return fp8.fp8_product(x, weight, scale, gated=True).view(*x.shape[:-1], weight.shape[0] // 2)
    w = kernel_weight(x, storage, weight, scale, zero)
    if w is None:
        return silu_and_mul(packed_products.packed_product(x, storage, weight, scale, zero)[0])
    return run_product(x, w, None, gated=True).view(*x.shape[:-1], weight.shape[0] // 2)


def linear_packed_add_rms_norm(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op `linear_packed_add_rms_norm`: blocks leave sums, and one more kernel adds them and norms."""
    if storage == "fp8" and scale is not None and _takes_fp8(x, weight):
        return sum_add_rms_norm(fp8.fp8_product(x, weight, scale, sums=True), bias, residual, norm_weight, eps)
    w = kernel_weight(x, storage, weight, scale, zero, sums=True)
    if w is None:
        return packed_products.linear_packed_add_rms_norm(
            x, storage, weight, scale, zero, residual, norm_weight, eps, bias
        )
    return sum_add_rms_norm(run_product(x, w, None, sums=True), bias, residual, norm_weight, eps)


# `num_tokens` of the providers: with other numbers of tokens, layers call the separate ops.


def num_tokens_linear_packed_silu_and_mul(weight: torch.Tensor) -> range:
    """Of 8-bit floats as many as their kernel takes, in rows as long as it takes. Of 17 tokens and more int4 alone has
    a kernel; others have two, as separate ops.
    """
    if weight.dtype != torch.uint8:
        return fp8.num_tokens_gated(weight)
    return range(1, (WIDE_TOKENS if _has_wide(weight.device) else MAX_TOKENS) + 1)


num_tokens_linear_packed_add_rms_norm = packed_products.num_tokens_linear_packed_add_rms_norm
