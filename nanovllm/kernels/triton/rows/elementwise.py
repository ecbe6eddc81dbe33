"""Elementwise chains in one pass: gelu(x + bias) and a * b + c.

An operand is a full tensor, or one row that is broadcast: a matrix with a row stride of 0. A program has a piece of one
row, so no index is taken modulo the row's length.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.device_math import activation, rounded, to_dtype, wide
from nanovllm.kernels.triton.early_start import small_elementwise
from nanovllm.kernels.triton.launch_arguments import cdiv, largest_block, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton.rows.activation import constant_blocks, gelu_kind, piece_of_row
from nanovllm.kernels.triton.rows.plans import POLICY, RowPolicy


@triton.jit
def _add_activation_kernel(
    x, bias, y, size, blocks, x_stride, bias_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """EVEN: BLOCK divides size. STREAM: x and y do not stay in the cache. DEPENDENT: see `small_elementwise`."""
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
    """DEPENDENT: see `small_elementwise`."""
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
    """(x, rows, size, strides of x and of the others, the others). One row if nothing is broadcast or strided."""
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


def _add_plan(size: int, many: bool, kind: str, itemsize: int) -> tuple[int, int]:
    """(block, warps) of `_add_activation_kernel`. With many elements a thread has two 16-byte loads of x."""
    if many:
        most = 1024 if itemsize == 4 else 4096 if kind == "gelu" else 2048
        block = largest_block(size, most, 512)
        if block:
            return block, warps_for(block, 8 if itemsize == 4 else 16)
    block = min(next_power_of_2(size), 4096 if many else 1024)
    return block, warps_for(block, most=8)


def fused_add_gelu(
    x: torch.Tensor, bias: torch.Tensor, approximate: str = "tanh", policy: RowPolicy = POLICY
) -> torch.Tensor:
    """The op `fused_add_gelu`. Takes row-strided matrices; copies other non-contiguous tensors."""
    kind = gelu_kind(approximate)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    x, rows, size, strides, (bias,) = _operands(x, {"bias": bias})
    plan = tunables.ADD_ACTIVATION.find(x.device, *tunables.elements_key(rows, size, x.dtype), kind)
    many = rows * size > policy.few_elements
    block, warps = (plan.block, plan.warps) if plan else _add_plan(size, many, kind, x.element_size())
    blocks = cdiv(size, block)
    stream = kind == "gelu" and x.element_size() == 2 and many  # measured: it pays with the longer function in 16 bits
    early = small_elementwise(y)
    _add_activation_kernel[(rows * blocks,)](
        x, bias, y, size, blocks, *strides, kind, block, constant_blocks(blocks), size % block == 0, stream, early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return y


def element_wise_mul_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The op `element_wise_mul_add`. Takes row-strided matrices; copies other non-contiguous tensors."""
    y = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if not a.numel():
        return y
    a, rows, size, strides, (b, c) = _operands(a, {"b": b, "c": c})
    plan = tunables.MUL_ADD.find(a.device, *tunables.elements_key(rows, size, a.dtype))
    block = plan.block if plan else min(next_power_of_2(size), 1024)
    blocks = cdiv(size, block)
    warps = plan.warps if plan else warps_for(block)
    early = small_elementwise(y)
    _mul_add_kernel[(rows * blocks,)](
        a, b, c, y, size, blocks, *strides, block, early, num_warps=warps, enable_fp_fusion=False, launch_pdl=early
    )
    return y
