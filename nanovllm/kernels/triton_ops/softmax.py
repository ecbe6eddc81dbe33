"""Softmax over the last dimension: one pass where a row fits into registers, else two over the row in memory."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels import tunables
from nanovllm.kernels.configs import bucket
from nanovllm.kernels.triton_ops._launch import cdiv, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton_ops._math import to_dtype

_MAX_BLOCK = 32768
_LONG_BLOCK = 8192
_SHORT_TILE = 1024


@triton.jit
def _softmax_kernel(x, y, rows, size, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < size)[None, :]
    v = tl.load(x + row[:, None] * stride + col[None, :], mask, other=-float("inf")).to(tl.float32)
    v = tl.exp(v - tl.max(v, 1)[:, None])
    v = v * (1.0 / tl.sum(v, 1))[:, None]
    tl.store(y + row[:, None] * size + col[None, :], to_dtype(v, y.dtype.element_ty), mask)


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


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The op `softmax`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows, stride = matrix_of(x)
    if not rows:
        return y
    block = next_power_of_2(size)
    if block > _MAX_BLOCK:
        _long_softmax_kernel[(rows,)](x, y, size, stride, _LONG_BLOCK, num_warps=16)
        return y
    plan = tunables.SOFTMAX.find(x.device, bucket(rows), size, x.dtype)
    per_program = plan.rows if plan else max(1, min(_SHORT_TILE // block, next_power_of_2(rows)))
    _softmax_kernel[(cdiv(rows, per_program),)](
        x, y, rows, size, stride, per_program, block,
        num_warps=plan.warps if plan else warps_for(block * per_program, 8 if rows <= 1024 else 16),
    )  # fmt: skip
    return y
