"""Activations: alone, and of the gate half of a fused gate-up projection times its up half."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels import tunables
from nanovllm.kernels.triton_ops._launch import cdiv, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton_ops._math import activation, rounded, to_dtype

_KINDS = ("gelu", "gelu_tanh", "silu", "mish", "relu")
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@triton.jit
def _activate_and_mul_kernel(gate_up, y, size, stride, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr):
    dtype = y.dtype.element_ty
    # Neighbouring programs take neighbouring pieces of a row.
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = col < size
    gate_up += row * stride
    gate = tl.load(gate_up + col, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + col, mask, other=0.0).to(tl.float32)
    activated = rounded(activation(gate, KIND, dtype), dtype)
    tl.store(y + row * size + col, to_dtype(activated * up, dtype), mask)


def _activate_and_mul(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: its last dimension must be even (gate, then up), not {gate_up.shape[-1]}")
    size = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    gate_up, rows, stride = matrix_of(gate_up)
    if rows and size:
        plan = tunables.ACTIVATE_AND_MUL.find(y.device, *tunables.elements_key(rows, size, y.dtype), kind)
        block = plan.block if plan else min(next_power_of_2(size), 1024 if rows * size <= 1 << 21 else 2048)
        blocks = cdiv(size, block)
        _activate_and_mul_kernel[(rows * blocks,)](
            gate_up, y, size, stride, blocks, kind, block, num_warps=plan.warps if plan else warps_for(block)
        )
    return y


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The op `silu_and_mul`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
    return _activate_and_mul(gate_up, "silu")


def gelu_and_mul(gate_up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The op `gelu_and_mul`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
    return _activate_and_mul(gate_up, gelu_kind(approximate))


def gelu_kind(approximate: str) -> str:
    """torch's name of a GELU to ours."""
    if approximate not in _GELU:
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    return _GELU[approximate]


@triton.jit
def _activation_kernel(x, y, size, stride, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr):
    dtype = y.dtype.element_ty
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    mask = col < size - start
    v = tl.load(x + row * stride + start + col, mask, other=0.0).to(tl.float32)
    tl.store(y + row * size + start + col, to_dtype(activation(v, KIND, dtype), dtype), mask)


def fused_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The op `fused_activation`. Takes row-strided matrices as they are; other non-contiguous tensors are copied."""
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
    block = plan.block if plan else min(next_power_of_2(size), 1024 if rows * size <= 1 << 21 else 2048)
    blocks = cdiv(size, block)
    warps = plan.warps if plan else warps_for(block, most=4)
    _activation_kernel[(rows * blocks,)](x, y, size, stride, blocks, kind, block, num_warps=warps)
    return y
