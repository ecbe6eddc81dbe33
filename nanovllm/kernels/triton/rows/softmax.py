"""Softmax over the last dimension: one pass if a row fits into registers, else two passes over the row in memory.

If the rows are fewer than the multiprocessors, several programs share each row. DEPENDENT: launched before the kernel
that writes x has ended (`early_start`).
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.device_math import to_dtype
from nanovllm.kernels.triton.early_start import can_launch_early
from nanovllm.kernels.triton.launch_arguments import cdiv, matrix_of, next_power_of_2, num_sms, warps_for

_MAX_BLOCK = 32768
_LONG_BLOCK = 8192
_PART, _LARGE_PART = 1024, 8192  # elements of a program, if several share a row
_FEW_ROWS = 16  # up to this number of rows, a program has _PART elements
_MOST_PARTS = 1024  # of a row: each of its programs loads all of them
_SHORT_TILE = 1024


@triton.jit
def _softmax_kernel(x, y, rows, size, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < size)[None, :]
    v = tl.load(x + row[:, None] * stride + col[None, :], mask, other=-float("inf")).to(tl.float32)
    v = tl.exp(v - tl.max(v, 1)[:, None])
    v = v * (1.0 / tl.sum(v, 1))[:, None]
    tl.store(y + row[:, None] * size + col[None, :], to_dtype(v, y.dtype.element_ty), mask)


@triton.jit
def _softmax_parts_kernel(x, parts, size, stride, pieces, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid [rows, pieces]. Writes the largest value of a piece, and the sum of exponentials relative to it."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    col = piece * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + col, col < size, other=-float("inf")).to(tl.float32)
    best = tl.max(v, 0)
    shift = tl.where(best == -float("inf"), 0.0, best)  # not inf - inf
    part = parts + 2 * (row * pieces + piece)
    tl.store(part, best)
    tl.store(part + 1, tl.sum(tl.exp(v - shift), 0))


@triton.jit
def _softmax_pieces_kernel(
    x, parts, y, size, stride, pieces, BLOCK: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid [rows, pieces]. Writes the softmax of a piece, from the parts of all pieces of its row.

    DEPENDENT: launched when the programs that write the parts end. These have waited for x, so x can be loaded before
    the wait. But this multiprocessor has not waited, and its first-level cache may hold older data: loads go past it.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + col, col < size, other=-float("inf"), cache_modifier=".cg" if DEPENDENT else "").to(
        tl.float32
    )
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    part = tl.arange(0, PARTS)
    best = tl.load(parts + 2 * (row * pieces + part), part < pieces, other=-float("inf"))
    total = tl.load(parts + 2 * (row * pieces + part) + 1, part < pieces, other=0.0)
    largest = tl.max(best, 0)
    shift = tl.where(best == -float("inf"), 0.0, largest)
    scale = 1.0 / tl.sum(total * tl.exp(best - shift), 0)
    tl.store(y + row * size + col, to_dtype(tl.exp(v - largest) * scale, y.dtype.element_ty), col < size)


@triton.jit
def _long_softmax_kernel(x, y, size, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    # Every lane keeps the largest value it has seen and the sum of exponentials relative to it (Milakov and Gimelshein,
    # "Online normalizer calculation for softmax", 2018). A lane that has seen only -inf must not compute inf - inf.
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        v = tl.load(x + col, col < size, other=-float("inf")).to(tl.float32)
        new_best = tl.maximum(best, v)
        shift = tl.where(new_best == -float("inf"), 0.0, new_best)
        total = total * tl.exp(best - shift) + tl.exp(v - shift)
        best = new_best
    largest = tl.max(best, 0)
    shift = tl.where(best == -float("inf"), 0.0, largest)
    scale = 1.0 / tl.sum(total * tl.exp(best - shift), 0)
    for start in range(0, size, BLOCK):
        col = start + tl.arange(0, BLOCK)
        v = tl.load(x + col, col < size, other=-float("inf")).to(tl.float32)
        tl.store(y + row * size + col, to_dtype(tl.exp(v - largest) * scale, y.dtype.element_ty), col < size)


def _warps(rows: int, elements: int) -> int:
    # More than 8 warps for 4096 elements wait longer for each other than they save.
    if rows > 1024:
        return warps_for(elements, 16)
    return warps_for(elements, 8, 8 if elements <= 4096 else 16)


def _split_softmax(x: torch.Tensor, y: torch.Tensor, rows: int, size: int, stride: int) -> None:
    """Several programs a row: one kernel for what they need of each other, one for the result."""
    part = _PART if rows <= _FEW_ROWS and size <= _MOST_PARTS * _PART else _LARGE_PART
    pieces = cdiv(size, part)
    parts = torch.empty((rows, pieces, 2), dtype=torch.float32, device=x.device)
    early, warps = can_launch_early(x), warps_for(part)
    _softmax_parts_kernel[(rows, pieces)](
        x, parts, size, stride, pieces, part, early, num_warps=warps, launch_pdl=early
    )
    _softmax_pieces_kernel[(rows, pieces)](
        x, parts, y, size, stride, pieces, part, next_power_of_2(pieces), early, num_warps=warps, launch_pdl=early
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The op `softmax`. Takes row-strided matrices; copies other non-contiguous tensors."""
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows, stride = matrix_of(x)
    if not rows:
        return y
    block = next_power_of_2(size)
    if block > _MAX_BLOCK and size <= _MOST_PARTS * _LARGE_PART and rows <= num_sms(x):
        _split_softmax(x, y, rows, size, stride)
        return y
    if block > _MAX_BLOCK:
        _long_softmax_kernel[(rows,)](x, y, size, stride, _LONG_BLOCK, num_warps=16)
        return y
    plan = tunables.SOFTMAX.find(x.device, bucket(rows), size, x.dtype)
    per_program = plan.rows if plan else max(1, min(_SHORT_TILE // block, next_power_of_2(rows)))
    early = can_launch_early(x)
    _softmax_kernel[(cdiv(rows, per_program),)](
        x, y, rows, size, stride, per_program, block, early,
        num_warps=plan.warps if plan else _warps(rows, block * per_program), launch_pdl=early,
    )  # fmt: skip
    return y
