"""Packed weights as a matrix of plain numbers: for many tokens, for what the kernels of few tokens do not take, and for
the rows of an embedding.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.gguf_blocks import GGUFType, check_gguf
from nanovllm.kernels.ops.linear_fp8 import block_shape
from nanovllm.kernels.ops.linear_int4 import group_size
from nanovllm.kernels.triton.device_math import to_dtype
from nanovllm.kernels.triton.early_start import launched_early
from nanovllm.kernels.triton.gemm.packed_decode import fp8_to_float32
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv
from nanovllm.kernels.triton.rows.move_rows import converts_to_fp8, to_fp8

_ROWS, _COLUMNS = 16, 256
_FEW_ROWS = 32
"""Up to which a program has one row, and one warp: the rows of a decode step."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["index"])
def dequantise_kernel(
    weight,  # words [num_rows, words]: int32, or uint8 if PER is 1
    high,  # the plane qh of GGUF in the same words, PER is 8 or 1; None: no bits above BITS
    d,  # [rows, columns] of scales
    m,  # minima, like d; with `mn` scales of the minima; None: 0
    sc,  # [num_rows, parts] integers, by which d is multiplied; None: 1
    mn,  # like sc, multiplied by m and subtracted; None: m is added
    zero,  # uint8 [num_rows, parts]; None: ZERO
    index,  # [num_rows]: which row of the weight a row of the result is; None: all, in order
    factor,  # float32 [num_rows], by which rows are multiplied before they are rounded; None: 1
    out,  # [num_rows, size]; uint8: the bits of float8_e4m3fn
    num_rows, size, weight_stride, high_stride, d_stride, sc_stride, zero_stride,
    FLOATS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    PER: tl.constexpr,  # weights that are read at once, and have the same scales: those of a word, or one
    D_ROWS: tl.constexpr, D_COLUMNS: tl.constexpr,  # that share a number of d
    PART: tl.constexpr,  # columns that share one of sc, mn and zero
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
    CONVERTS: tl.constexpr,  # the GPU has an instruction that rounds to e4m3
):  # fmt: skip
    """Grid [tiles of rows, tiles of columns]."""
    to = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    first = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // PER) * PER)[None, :]
    live = (to < num_rows) & (first < size)
    row = to
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if index is not None:
        row = tl.load(index + to, to < num_rows, other=0).to(tl.int64)
    place = tl.arange(0, PER)[None, None, :]
    word = tl.load(weight + row * weight_stride + (first // PER if PER > 1 else first * BITS // 8), live, other=0)
    shift = place * BITS if PER > 1 else (first % (8 // BITS) * BITS)[:, :, None]
    code = (word.to(tl.int32)[:, :, None] >> shift) & (2**BITS - 1)
    if high is not None:
        at = first // 16 if PER > 1 else first // 16 * 4 + first % 8 // 2
        bits = tl.load(high + row * high_stride + at, live, other=0).to(tl.int32)[:, :, None]
        place = first[:, :, None] % 8 + place
        shift = place % 2 * 2 + (1 - first // 8 % 2)[:, :, None] * 4 + (place // 2 * 8 if PER > 1 else 0)
        code |= (bits >> shift & 3) << BITS
        place = tl.arange(0, PER)[None, None, :]
    part = first // PART
    d_at = row // D_ROWS * d_stride + first // D_COLUMNS
    s = tl.load(d + d_at, live, other=0.0).to(tl.float32)
    if sc is not None:
        s = s * tl.load(sc + row * sc_stride + part, live, other=0).to(tl.float32)
    if FLOATS:
        y = fp8_to_float32(code) * s[:, :, None]
    elif zero is None:
        y = s[:, :, None] * (code - ZERO).to(tl.float32)
    else:
        z = tl.load(zero + row * zero_stride + part, live, other=0).to(tl.int32)
        y = s[:, :, None] * (code - z[:, :, None]).to(tl.float32)
    if m is not None:
        low = tl.load(m + d_at, live, other=0.0).to(tl.float32)
        if mn is not None:
            low = -low * tl.load(mn + row * sc_stride + part, live, other=0).to(tl.float32)
        y += low[:, :, None]
    if factor is not None:
        y *= tl.load(factor + row, to < num_rows, other=0.0)[:, :, None]
    if out.dtype.element_ty != tl.uint8:
        y = to_dtype(y, out.dtype.element_ty)
    elif CONVERTS:
        y = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        y = to_fp8(y)
    tl.store(out + (to * size + first)[:, :, None] + place, y, live[:, :, None])


def dequantised(
    weight: torch.Tensor, size: int, dtype: torch.dtype, d: torch.Tensor, *,
    bits: int, zero: int | torch.Tensor = 0, floats: bool = False, d_rows: int = 1, d_columns: int, part: int = 1,
    m: torch.Tensor | None = None, sc: torch.Tensor | None = None, mn: torch.Tensor | None = None,
    index: torch.Tensor | None = None, high: torch.Tensor | None = None, factor: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A packed weight [num_rows, bytes] as [num_rows, size] in `dtype`, rounded once. Operands as the kernel's.

    Args:
        dtype: torch.uint8: the bits of float8_e4m3fn.
        index: integers [n], contiguous: of these rows alone, [n, size].
        out: takes the result; contiguous.
    """
    num_rows, per = (weight if index is None else index).shape[0], 32 // bits
    if out is None:
        out = torch.empty((num_rows, size), dtype=dtype, device=weight.device)
    zeros = zero if isinstance(zero, torch.Tensor) else None
    parts = part if sc is not None or zeros is not None else per
    aligned = weight.stride(1) == 1 and not (weight.stride(0) | weight.storage_offset() | weight.data_ptr()) % 4
    if high is not None:
        aligned = aligned and high.stride() == weight.stride() and high.storage_offset() % 4 == 0
    if aligned and weight.shape[1] % 4 == size % per == d_columns % per == parts % per == 0:
        weight, high = weight.view(torch.int32), None if high is None else high.view(torch.int32)
    else:
        per = 1
    if out.numel():
        few = num_rows <= _FEW_ROWS
        rows = 1 if few else _ROWS
        early = index is not None and launched_early(weight, num_rows)
        dequantise_kernel[cdiv(num_rows, rows), cdiv(size, _COLUMNS)](
            weight, high, d, m, sc, mn, zeros, index, factor, out, num_rows, size, weight.stride(0),
            0 if high is None else high.stride(0), d.stride(0),
            0 if sc is None else sc.stride(0), 0 if zeros is None else zeros.stride(0),
            floats, bits, 0 if isinstance(zero, torch.Tensor) else zero, per, d_rows, d_columns, part, rows, _COLUMNS,
            early, converts_to_fp8(weight.device), num_warps=1 if few else 4, launch_pdl=early,
        )  # fmt: skip
    return out


class GGUFPlanes(NamedTuple):
    """The planes of a weight as kernels take them: views."""

    codes: torch.Tensor
    high: torch.Tensor | None
    d: torch.Tensor
    m: torch.Tensor | None
    sc: torch.Tensor | None
    mn: torch.Tensor | None


def planes_of(of: GGUFType, weight: torch.Tensor, size: int) -> GGUFPlanes:
    """weight: uint8 [num_rows, bytes], rows of planes."""
    planes: dict[str, Any] = {name: of.plane(weight, name, size).flatten(1) for name in of.planes}
    for name in {"d", "m"} & planes.keys():
        odd = planes[name].stride(0) % 2 or planes[name].storage_offset() % 2
        planes[name] = (planes[name].contiguous() if odd else planes[name]).view(torch.float16)
    if "sc" in planes and of.part == 16:  # Q6_K's are signed
        planes["sc"] = planes["sc"].view(torch.int8)
    return GGUFPlanes(planes["q"], planes.get("qh"), planes["d"], planes.get("m"), planes.get("sc"), planes.get("mn"))


def dequantised_gguf(
    of: GGUFType, planes: GGUFPlanes, size: int, dtype: torch.dtype, **others: torch.Tensor | None
) -> torch.Tensor:
    """`dequantised` of GGUF's planes. others: index, factor and out of `dequantised`."""
    codes, high, d, m, sc, mn = planes
    return dequantised(
        codes, size, dtype, d, bits=of.bits, zero=of.zero, d_columns=of.block_size, part=of.part, m=m, sc=sc, mn=mn,
        high=high, **others,
    )  # fmt: skip


def dequantised_packed(
    storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, size: int,
    dtype: torch.dtype, **others: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """`dequantised` of a weight in any form of storage; None: of GGUF's blocks as stored.

    Operands: as of `linear_packed_silu_and_mul`. others: index, factor and out of `dequantised`.
    """
    if scale is None:
        of, planes = check_gguf(weight, storage, size)
        return dequantised_gguf(of, planes_of(of, adjacent(weight), size), size, dtype, **others) if planes else None
    scale = adjacent(scale)
    if storage == "fp8":
        height, width = block_shape(weight, scale)
        codes = adjacent(weight).view(torch.uint8)
        return dequantised(codes, size, dtype, scale, bits=8, floats=True, d_rows=height, d_columns=width, **others)
    bits, group = int(storage[3:]), group_size(size, scale)
    if zero is not None and zero.stride(1) != 1:
        zero = zero.contiguous()
    return dequantised(
        adjacent(weight), size, dtype, scale, bits=bits, zero=1 << bits - 1 if zero is None else zero,
        d_columns=group, part=group, **others,
    )  # fmt: skip
