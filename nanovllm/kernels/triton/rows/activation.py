"""Activations: alone, and of the gate half of a fused gate-up projection times its up half."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.device_math import activation, rounded, to_dtype, wide
from nanovllm.kernels.triton.early_start import small_elementwise
from nanovllm.kernels.triton.launch_arguments import cdiv, largest_block, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton.rows.plans import POLICY, RowPolicy

_KINDS = ("gelu", "gelu_tanh", "silu", "mish", "relu")
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}
_MOST_CONSTANT_BLOCKS = 16  # pieces of a row: a kernel is compiled for each number up to here


@triton.jit
def piece_of_row(blocks, BLOCKS: tl.constexpr):
    """(row as int64, piece) of a program. Neighbouring programs take neighbouring pieces of a row."""
    # Division by a constant is a multiplication.
    if BLOCKS:
        return (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    else:
        return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks


def constant_blocks(blocks: int) -> int:
    """BLOCKS of `piece_of_row`; 0: not a constant."""
    return blocks if blocks <= _MOST_CONSTANT_BLOCKS else 0


@triton.jit
def activate_and_mul_kernel(
    gate_up, y, size, stride, blocks,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr = 0, EVEN: tl.constexpr = False,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """EVEN: BLOCK divides size. DEPENDENT: see `small_elementwise`."""
    dtype = y.dtype.element_ty
    row, piece = piece_of_row(blocks, BLOCKS)
    col = piece * BLOCK + tl.arange(0, BLOCK)
    gate_up += row * stride
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if EVEN:
        gate = tl.load(gate_up + col)
        up = tl.load(gate_up + size + col)
    else:
        gate = tl.load(gate_up + col, col < size, other=0.0)
        up = tl.load(gate_up + size + col, col < size, other=0.0)
    activated = rounded(activation(wide(gate), KIND, dtype), dtype)
    result = to_dtype(activated * up.to(tl.float32), dtype)
    if EVEN:
        tl.store(y + row * size + col, result)
    else:
        tl.store(y + row * size + col, result, col < size)


def _activate_and_mul(gate_up: torch.Tensor, kind: str, policy: RowPolicy) -> torch.Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: its last dimension must be even (gate, then up), not {gate_up.shape[-1]}")
    size = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    gate_up, rows, stride = matrix_of(gate_up)
    if rows and size:
        plan = tunables.ACTIVATE_AND_MUL.find(y.device, *tunables.elements_key(rows, size, y.dtype), kind)
        if plan:
            block = plan.block
        elif rows * size <= policy.few_elements:
            block = min(next_power_of_2(size), 1024)
        else:  # no idle part at the end of a row, if its size allows
            block = largest_block(size, 1024, 512) or min(next_power_of_2(size), 2048)
        blocks = cdiv(size, block)
        early = small_elementwise(y)
        activate_and_mul_kernel[(rows * blocks,)](
            gate_up, y, size, stride, blocks, kind, block, constant_blocks(blocks), size % block == 0, early,
            num_warps=plan.warps if plan else warps_for(block), launch_pdl=early,
        )  # fmt: skip
    return y


def silu_and_mul(gate_up: torch.Tensor, policy: RowPolicy = POLICY) -> torch.Tensor:
    """The op `silu_and_mul`. Takes row-strided matrices; copies other non-contiguous tensors."""
    return _activate_and_mul(gate_up, "silu", policy)


def gelu_and_mul(gate_up: torch.Tensor, approximate: str = "none", policy: RowPolicy = POLICY) -> torch.Tensor:
    """The op `gelu_and_mul`. Takes row-strided matrices; copies other non-contiguous tensors."""
    return _activate_and_mul(gate_up, gelu_kind(approximate), policy)


def gelu_kind(approximate: str) -> str:
    """The activation of PyTorch's `approximate`. Raises ValueError unless it is "none" or "tanh"."""
    if approximate not in _GELU:
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    return _GELU[approximate]


@triton.jit
def activation_kernel(
    x, y, size, stride, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False
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
    v = tl.load(x + row * stride + start + col, mask, other=0.0).to(tl.float32)
    tl.store(y + row * size + start + col, to_dtype(activation(v, KIND, dtype), dtype), mask)


def fused_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The op `fused_activation`. Takes row-strided matrices; copies other non-contiguous tensors."""
    if kind not in _KINDS:
        raise ValueError(f"kind: expected one of {', '.join(_KINDS)}, not {kind!r}")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    if x.is_contiguous():
        rows, size, stride = 1, x.numel(), x.numel()
    else:
        x, rows, stride = matrix_of(x)
        size = x.shape[-1]
    plan = tunables.ACTIVATION.find(x.device, *tunables.elements_key(rows, size, x.dtype), kind)
    most = 1024 if rows * size <= POLICY.few_elements else 2048
    block = plan.block if plan else min(next_power_of_2(size), most)
    blocks = cdiv(size, block)
    warps = plan.warps if plan else warps_for(block, most=4)
    early = small_elementwise(y)
    activation_kernel[(rows * blocks,)](
        x, y, size, stride, blocks, kind, block, early, num_warps=warps, launch_pdl=early
    )
    return y
