"""Elementwise chains in one pass: gelu(x + bias) and a * b + c.

An operand is either a full tensor or one row that is broadcast: a matrix with a row stride of 0, which is loaded as
wide as any other (from the cache), without taking an index modulo the row's length. A program takes a piece of one
row.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.device_math import activation, rounded, to_dtype, wide
from nanovllm.kernels.triton.early_start import small_elementwise
from nanovllm.kernels.triton.launch_arguments import cdiv, largest_block, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton.rows.activation import constant_blocks, gelu_kind, piece_of_row

_FEW_ELEMENTS = 1 << 21


@triton.jit
def _add_activation_kernel(
    x, bias, y, size, blocks, x_stride, bias_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """EVEN: BLOCK divides size.

    STREAM: neither x nor y is to stay in the cache. DEPENDENT: as `small_elementwise` says.
    """
    dtype = y.dtype.element_ty
    row, piece = piece_of_row(blocks, BLOCKS)
    start = piece.to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    policy: tl.constexpr = "evict_first" if STREAM else ""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if EVEN:
        v = tl.load(x + row * x_stride + start + col, eviction_policy=policy)
        b = tl.load(bias + row * bias_stride + start + col)
    else:
        v = tl.load(x + row * x_stride + start + col, col < size - start, other=0.0, eviction_policy=policy)
        b = tl.load(bias + row * bias_stride + start + col, col < size - start, other=0.0)
    # Narrowed and widened again in steps that leave one packed addition for two elements.
    v = wide(to_dtype(v.to(tl.float32) + b.to(tl.float32), dtype))
    v = to_dtype(activation(v, KIND, dtype), dtype)
    modifier: tl.constexpr = ".cs" if STREAM else ""
    if EVEN:
        tl.store(y + row * size + start + col, v, cache_modifier=modifier)
    else:
        tl.store(y + row * size + start + col, v, col < size - start, cache_modifier=modifier)


@triton.jit
def _mul_add_kernel(
    a, b, c, y, size, blocks, a_stride, b_stride, c_stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
):
    """DEPENDENT: as `small_elementwise` says."""
    dtype = y.dtype.element_ty
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    mask = col < size - start
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    av = tl.load(a + row * a_stride + start + col, mask, other=0.0).to(tl.float32)
    bv = tl.load(b + row * b_stride + start + col, mask, other=0.0).to(tl.float32)
    cv = tl.load(c + row * c_stride + start + col, mask, other=0.0).to(tl.float32)
    # The product is rounded before the sum, as in the reference; launched without contraction to FMA.
    tl.store(y + row * size + start + col, to_dtype(rounded(av * bv, dtype) + cv, dtype), mask)


def _operands(x: torch.Tensor, others: dict[str, torch.Tensor]):
    """(x, rows, size, [stride of x and of each other], the others): one long row where nothing is broadcast or
    strided."""
    n = x.shape[-1]
    for name, t in others.items():
        if t.shape != x.shape and t.shape != (n,):
            raise ValueError(f"{name}: expected shape {tuple(x.shape)} or ({n},), not {tuple(t.shape)}")
    if all(t.is_contiguous() and t.shape == x.shape for t in (x, *others.values())):
        return x, 1, x.numel(), [x.numel()] * (1 + len(others)), list(others.values())
    given = x.shape
    x, rows, stride = matrix_of(x)
    strides, prepared = [stride], []
    for t in others.values():
        is_row = t.shape != given
        t, _, stride = matrix_of(t)
        prepared.append(t)
        strides.append(0 if is_row else stride)
    return x, rows, n, strides, prepared


def _block(rows: int, size: int) -> int:
    return min(next_power_of_2(size), 1024 if rows * size <= _FEW_ELEMENTS else 4096)


def _add_plan(rows: int, size: int, kind: str, itemsize: int) -> tuple[int, int]:
    """(block, warps) of `_add_activation_kernel`: two 16-byte loads of x a thread for many elements, none idle."""
    if rows * size > _FEW_ELEMENTS:
        most = 1024 if itemsize == 4 else 4096 if kind == "gelu" else 2048
        block = largest_block(size, most, 512)
        if block:
            return block, warps_for(block, 8 if itemsize == 4 else 16)
    block = _block(rows, size)
    return block, warps_for(block, most=8)


def fused_add_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """The op `fused_add_gelu`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
    kind = gelu_kind(approximate)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    x, rows, size, strides, (bias,) = _operands(x, {"bias": bias})
    plan = tunables.ADD_ACTIVATION.find(x.device, *tunables.elements_key(rows, size, x.dtype), kind)
    block, warps = (plan.block, plan.warps) if plan else _add_plan(rows, size, kind, x.element_size())
    blocks = cdiv(size, block)
    # Measured: with the longer of the functions in 16 bits it pays to stream.
    stream = kind == "gelu" and x.element_size() == 2 and rows * size > _FEW_ELEMENTS
    early = small_elementwise(y)
    _add_activation_kernel[(rows * blocks,)](
        x, bias, y, size, blocks, *strides, kind, block, constant_blocks(blocks), size % block == 0, stream, early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return y


def element_wise_mul_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The op `element_wise_mul_add`.

    Takes row-strided matrices as they are; other non-contiguous tensors are copied.
    """
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if not a.numel():
        return y
    a, rows, size, strides, (b, c) = _operands(a, {"b": b, "c": c})
    plan = tunables.MUL_ADD.find(a.device, *tunables.elements_key(rows, size, a.dtype))
    block = plan.block if plan else min(_block(rows, size), 1024)
    blocks = cdiv(size, block)
    warps = plan.warps if plan else warps_for(block)
    early = small_elementwise(y)
    _mul_add_kernel[(rows * blocks,)](
        a, b, c, y, size, blocks, *strides, block, early, num_warps=warps, enable_fp_fusion=False, launch_pdl=early
    )
    return y
