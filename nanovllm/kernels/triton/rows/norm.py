"""RMS norm, alone and with the residual addition before it, and layer norm.

A row is held in registers and read once: in one block, or in exact `pieces`. Rows of more than `_MAX_BLOCK` elements
are read twice. DEPENDENT, in all kernels: launched before the kernel that writes x has ended (`early_start`). Such a
kernel loads its weights before it waits.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.device_math import rounded, to_dtype
from nanovllm.kernels.triton.early_start import are_constant, can_launch_early, norm_launched_early
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, next_power_of_2, rows_of, warps_for
from nanovllm.kernels.triton.rows.pieces import (
    cut_of_few,
    cut_of_many,
    layer_normed,
    layer_statistics,
    norm_pieces_kernel,
)
from nanovllm.kernels.triton.rows.plans import POLICY, RowPolicy

_MAX_BLOCK = 32768
_LONG_BLOCK = 8192
_MOST_PIECES = 7
_SHORT_TILE = 1024  # elements of a tile that holds several short rows (the heads of q and k)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, weight, y, rows, inner, outer_stride, inner_stride, size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    dtype = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    in_row = col < size
    mask = (row < rows)[:, None] & in_row[None, :]
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    w = tl.load(weight + col, in_row, other=0.0).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + start[:, None] + col[None, :], mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / size + eps)
    v = rounded(v * scale[:, None], dtype) * w[None, :]
    tl.store(y + row[:, None] * size + col[None, :], to_dtype(v, dtype), mask)


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, y, new_residual, x_stride, residual_stride, size, eps, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < size
    w = tl.load(weight + col, mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * x_stride + col, mask, other=0.0).to(tl.float32)
    r = tl.load(residual + row * residual_stride + col, mask, other=0.0).to(tl.float32)
    v = rounded(v + r, dtype)
    tl.store(new_residual + row * size + col, to_dtype(v, dtype), mask)
    scale = tl.rsqrt(tl.sum(v * v, 0) / size + eps)
    tl.store(y + row * size + col, to_dtype(rounded(v * scale, dtype) * w, dtype), mask)


@triton.jit
def _long_rms_norm_kernel(
    x, residual, weight, y, new_residual, inner, outer_stride, inner_stride, residual_stride, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += (row // inner) * outer_stride + (row % inner) * inner_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        v = tl.load(x + col, col < size, other=0.0).to(tl.float32)
        if ADD:
            v = rounded(
                v + tl.load(residual + row * residual_stride + col, col < size, other=0.0).to(tl.float32), dtype
            )
            tl.store(new_residual + row * size + col, to_dtype(v, dtype), col < size)
        squares += v * v
    scale = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    if ADD:
        x = new_residual + row * size
        tl.debug_barrier()  # a thread may load what another thread stored
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        v = tl.load(x + col, col < size, other=0.0).to(tl.float32)
        w = tl.load(weight + col, col < size, other=0.0).to(tl.float32)
        tl.store(y + row * size + col, to_dtype(rounded(v * scale, dtype) * w, dtype), col < size)


def _cut_of_many(size: int, block: int, warps: int | None) -> tuple[int, int] | None:
    """(pieces, warps) for `norm_pieces_kernel`; None: one block a row. `warps`: those of a plan.

    A block leaves nothing idle of a power of two: above 1024, pieces gained nothing there.
    """
    return None if block < 1024 or size == block > 1024 else cut_of_many(size, _MOST_PIECES, warps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, policy: RowPolicy = POLICY) -> torch.Tensor:
    """The op `rms_norm`. Takes views of a fused projection; copies other non-contiguous tensors."""
    size = x.shape[-1]
    weight = adjacent(weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows, inner, outer_stride, inner_stride = rows_of(x)
    if not rows:
        return y
    block = next_power_of_2(size)
    if block > _MAX_BLOCK:
        _long_rms_norm_kernel[(rows,)](
            x, x, weight, y, y, inner, outer_stride, inner_stride, size, size, eps, False, _LONG_BLOCK, num_warps=16
        )
        return y
    plan = tunables.RMS_NORM.find(x.device, bucket(rows), size, x.dtype)
    per_program = plan.rows if plan else max(1, min(_SHORT_TILE // block, next_power_of_2(rows)))
    many = rows > policy.few_rows
    cut = _cut_of_many(size, block, plan.warps if plan else None) if many and per_program == 1 else None
    early = norm_launched_early(x, rows) and are_constant(weight)
    if cut:
        pieces, warps = cut
        norm_pieces_kernel[(rows,)](
            x, weight, weight, y, inner, outer_stride, inner_stride, size, eps, size // pieces, pieces, False, True,
            early, num_warps=warps, launch_pdl=early,
        )  # fmt: skip
        return y
    _rms_norm_kernel[(cdiv(rows, per_program),)](
        x, weight, y, rows, inner, outer_stride, inner_stride, size, eps, per_program, block, early,
        num_warps=plan.warps if plan else warps_for(block * per_program, 16 if many else 8), launch_pdl=early,
    )  # fmt: skip
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, fresh: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `add_rms_norm`. If x and residual are contiguous and do not overlap, the results reuse their memory.

    Takes row-strided matrices; copies other non-contiguous tensors.

    Args:
        fresh: the results are new memory.
    """
    in_memory = not fresh and x.is_contiguous() and residual.is_contiguous()
    if in_memory and abs(x.data_ptr() - residual.data_ptr()) >= x.nbytes:
        return add_rms_norm_out(x, residual, weight, eps, x, residual)
    y, new_residual = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return add_rms_norm_out(x, residual, weight, eps, y, new_residual)


def add_rms_norm_out(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor,
    new_residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`add_rms_norm` into given contiguous tensors, each of which may be x or residual themselves."""
    size = x.shape[-1]
    weight = adjacent(weight)
    x, rows, x_stride = matrix_of(x)
    residual, _, residual_stride = matrix_of(residual)
    if not rows:
        return y, new_residual
    block = next_power_of_2(size)
    if block > _MAX_BLOCK:
        _long_rms_norm_kernel[(rows,)](
            x, residual, weight, y, new_residual, 1, x_stride, x_stride, residual_stride, size, eps, True, _LONG_BLOCK,
            num_warps=16,
        )  # fmt: skip
    else:
        plan = tunables.ADD_RMS_NORM.find(x.device, bucket(rows), size, x.dtype)
        early = norm_launched_early(x, rows) and are_constant(weight)
        _add_rms_norm_kernel[(rows,)](
            x, residual, weight, y, new_residual, x_stride, residual_stride, size, eps, block, early,
            num_warps=plan.warps if plan else warps_for(block, 8 if rows <= POLICY.few_rows else 16), launch_pdl=early,
        )  # fmt: skip
    return y, new_residual


@triton.jit
def _layer_norm_kernel(x, weight, bias, y, stride, size, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    x += tl.program_id(0).to(tl.int64) * stride
    col = tl.arange(0, BLOCK)
    mask = col < size
    w = tl.load(weight + col, mask, other=0.0)
    b = tl.load(bias + col, mask, other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + col, mask, other=0.0)
    statistics = layer_statistics(x, (v,), col, size, eps, BLOCK, 1, False)
    v = layer_normed(v, statistics, True) * w.to(tl.float32) + b.to(tl.float32)
    tl.store(y + tl.program_id(0).to(tl.int64) * size + col, to_dtype(v, y.dtype.element_ty), mask)


@triton.jit
def _long_layer_norm_kernel(x, weight, bias, y, stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        total += tl.load(x + col, col < size, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / size
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        v = tl.where(col < size, tl.load(x + col, col < size, other=0.0).to(tl.float32) - mean, 0.0)
        squares += v * v
    scale = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        v = tl.load(x + col, col < size, other=0.0).to(tl.float32) - mean
        w = tl.load(weight + col, col < size, other=0.0).to(tl.float32)
        b = tl.load(bias + col, col < size, other=0.0).to(tl.float32)
        tl.store(y + row * size + col, to_dtype(v * scale * w + b, y.dtype.element_ty), col < size)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, policy: RowPolicy = POLICY
) -> torch.Tensor:
    """The op `layer_norm`. Takes row-strided matrices; copies other non-contiguous tensors."""
    size = x.shape[-1]
    weight, bias = adjacent(weight), adjacent(bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows, stride = matrix_of(x)
    block = next_power_of_2(size)
    if rows and block > _MAX_BLOCK:
        _long_layer_norm_kernel[(rows,)](x, weight, bias, y, stride, size, eps, _LONG_BLOCK, num_warps=16)
    elif rows:
        plan = tunables.LAYER_NORM.find(x.device, bucket(rows), size, x.dtype)
        many = rows > policy.few_rows
        early = can_launch_early(x) and are_constant(weight, bias)
        cut = _cut_of_many(size, block, plan.warps if plan else None) if many else cut_of_few(size)
        if cut:
            pieces, warps = cut
            norm_pieces_kernel[(rows,)](
                x, weight, bias, y, 1, stride, stride, size, eps, size // pieces, pieces, True, many, early,
                num_warps=plan.warps if plan else warps, launch_pdl=early,
            )  # fmt: skip
            return y
        warps = plan.warps if plan else warps_for(block, 32 if many else 8)
        _layer_norm_kernel[(rows,)](
            x, weight, bias, y, stride, size, eps, block, early, num_warps=warps, launch_pdl=early
        )
    return y
