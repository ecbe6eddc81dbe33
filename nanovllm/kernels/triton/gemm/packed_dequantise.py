"""Packed weights as a matrix of plain numbers: for many tokens, and for what the kernels of few tokens do not take."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import to_dtype
from nanovllm.kernels.triton.gemm.packed_decode import fp8_to_float32
from nanovllm.kernels.triton.launch_arguments import cdiv

_ROWS, _COLUMNS = 16, 256


@triton.jit
def dequantise_kernel(
    weight,  # words [num_rows, words]: int32, or uint8 if PER is 1
    d,  # [rows, columns] of scales
    m,  # minima, like d; with `mn` scales of the minima; None: 0
    sc,  # [num_rows, parts] integers, by which d is multiplied; None: 1
    mn,  # like sc, multiplied by m and subtracted; None: m is added
    zero,  # uint8 [num_rows, parts]; None: ZERO
    out,  # [num_rows, size]
    num_rows, size, weight_stride, d_stride, sc_stride, zero_stride,
    FLOATS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    PER: tl.constexpr,  # weights that are read at once, and have the same scales: those of a word, or one
    D_ROWS: tl.constexpr, D_COLUMNS: tl.constexpr,  # that share a number of d
    PART: tl.constexpr,  # columns that share one of sc, mn and zero
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of rows, tiles of columns]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    first = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // PER) * PER)[None, :]
    live = (row < num_rows) & (first < size)
    place = tl.arange(0, PER)[None, None, :]
    word = tl.load(weight + row * weight_stride + (first // PER if PER > 1 else first * BITS // 8), live, other=0)
    shift = place * BITS if PER > 1 else (first % (8 // BITS) * BITS)[:, :, None]
    code = (word.to(tl.int32)[:, :, None] >> shift) & (2**BITS - 1)
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
    tl.store(out + (row * size + first)[:, :, None] + place, to_dtype(y, out.dtype.element_ty), live[:, :, None])


def dequantised(
    weight: torch.Tensor, size: int, dtype: torch.dtype, d: torch.Tensor, *,
    bits: int, zero: int | torch.Tensor = 0, floats: bool = False, d_rows: int = 1, d_columns: int, part: int = 1,
    m: torch.Tensor | None = None, sc: torch.Tensor | None = None, mn: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A packed weight [num_rows, bytes] as [num_rows, size] in `dtype`, rounded once. Operands as the kernel's."""
    num_rows, per = weight.shape[0], 32 // bits
    out = torch.empty((num_rows, size), dtype=dtype, device=weight.device)
    zeros = zero if isinstance(zero, torch.Tensor) else None
    parts = part if sc is not None or zeros is not None else per
    aligned = weight.stride(1) == 1 and not (weight.stride(0) | weight.storage_offset() | weight.data_ptr()) % 4
    if aligned and weight.shape[1] % 4 == size % per == d_columns % per == parts % per == 0:
        weight = weight.view(torch.int32)
    else:
        per = 1
    if out.numel():
        dequantise_kernel[cdiv(num_rows, _ROWS), cdiv(size, _COLUMNS)](
            weight, d, m, sc, mn, zeros, out, num_rows, size, weight.stride(0), d.stride(0),
            0 if sc is None else sc.stride(0), 0 if zeros is None else zeros.stride(0),
            floats, bits, 0 if isinstance(zero, torch.Tensor) else zero, per, d_rows, d_columns, part, _ROWS, _COLUMNS,
        )  # fmt: skip
    return out
