"""Elementwise chains in one pass: gelu(x + bias) and a * b + c.

An operand is either a full tensor or one row that is broadcast. A tile spans a few rows, and the row is loaded once for
all of them, with the same wide loads as a full operand: no index is ever taken modulo the row's length.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._launch import cdiv, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton_ops._math import activation, rounded, to_dtype
from nanovllm.kernels.triton_ops.activation import gelu_kind

_FEW_ELEMENTS = 1 << 21


@triton.jit
def _load_operand(x, row, start, col, size, stride, row_mask, IS_ROW: tl.constexpr):
    """[ROWS, BLOCK] float32 of a full operand, [1, BLOCK] of a row that is broadcast."""
    col_mask = col < size - start
    if IS_ROW:
        return tl.load(x + start + col, col_mask, other=0.0).to(tl.float32)[None, :]
    else:
        mask = row_mask[:, None] & col_mask[None, :]
        return tl.load(x + start + row[:, None] * stride + col[None, :], mask, other=0.0).to(tl.float32)


@triton.jit
def _add_activation_kernel(
    x, bias, y, rows, size, blocks, x_stride, bias_stride,
    BIAS_ROW: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    in_rows = row < rows
    b = _load_operand(bias, row, start, col, size, bias_stride, in_rows, BIAS_ROW)
    v = rounded(_load_operand(x, row, start, col, size, x_stride, in_rows, False) + b, dtype)
    mask = in_rows[:, None] & (col < size - start)[None, :]
    tl.store(y + start + row[:, None] * size + col[None, :], to_dtype(activation(v, KIND, dtype), dtype), mask)


@triton.jit
def _mul_add_kernel(
    a, b, c, y, rows, size, blocks, a_stride, b_stride, c_stride,
    B_ROW: tl.constexpr, C_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    in_rows = row < rows
    bv = _load_operand(b, row, start, col, size, b_stride, in_rows, B_ROW)
    cv = _load_operand(c, row, start, col, size, c_stride, in_rows, C_ROW)
    av = _load_operand(a, row, start, col, size, a_stride, in_rows, False)
    mask = in_rows[:, None] & (col < size - start)[None, :]
    # The product is rounded before the sum, as in the reference; launched without contraction to FMA.
    tl.store(y + start + row[:, None] * size + col[None, :], to_dtype(rounded(av * bv, dtype) + cv, dtype), mask)


def _operands(x: torch.Tensor, others: dict[str, torch.Tensor]):
    """(x, rows, size, stride of x, [(operand, is a row, stride)]): flat if nothing is broadcast and all is contiguous."""
    n = x.shape[-1]
    broadcast = {name: t.dim() == 1 and x.dim() > 1 for name, t in others.items()}
    for name, t in others.items():
        if t.shape != x.shape and t.shape != (n,):
            raise ValueError(f"{name}: expected shape {tuple(x.shape)} or ({n},), not {tuple(t.shape)}")
    if not any(broadcast.values()) and x.is_contiguous() and all(t.is_contiguous() for t in others.values()):
        size = x.numel()
        return x, 1, size, size, [(t, False, size) for t in others.values()]
    x, rows, stride = matrix_of(x)
    prepared = []
    for name, t in others.items():
        t, _, t_stride = matrix_of(t)
        prepared.append((t, broadcast[name], t_stride))
    return x, rows, n, stride, prepared


def _tile(rows: int, size: int) -> tuple[int, int]:
    """(ROWS, BLOCK): about 1024 elements where the whole tensor is small, about 4096 where it is large."""
    block = min(next_power_of_2(size), 1024)
    elements = 1024 if rows * size <= _FEW_ELEMENTS else 4096
    if rows == 1:
        return 1, min(next_power_of_2(size), elements // 2 if elements > 1024 else elements)
    return max(1, min(elements // block, next_power_of_2(rows))), block


def fused_add_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """The op `fused_add_gelu`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
    kind = gelu_kind(approximate)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    x, rows, size, stride, ((bias, is_row, bias_stride),) = _operands(x, {"bias": bias})
    tile_rows, block = _tile(rows, size)
    blocks = cdiv(size, block)
    _add_activation_kernel[(cdiv(rows, tile_rows) * blocks,)](
        x, bias, y, rows, size, blocks, stride, bias_stride, is_row, kind, tile_rows, block,
        num_warps=warps_for(tile_rows * block, 8 if tile_rows == 1 else 16),
    )  # fmt: skip
    return y


def element_wise_mul_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The op `element_wise_mul_add`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if not a.numel():
        return y
    a, rows, size, stride, ((b, b_row, b_stride), (c, c_row, c_stride)) = _operands(a, {"b": b, "c": c})
    tile_rows, block = _tile(rows, size)
    blocks = cdiv(size, block)
    _mul_add_kernel[(cdiv(rows, tile_rows) * blocks,)](
        a, b, c, y, rows, size, blocks, stride, b_stride, c_stride, b_row, c_row, tile_rows, block,
        num_warps=warps_for(tile_rows * block, 8 if tile_rows == 1 else 16), enable_fp_fusion=False,
    )  # fmt: skip
    return y
