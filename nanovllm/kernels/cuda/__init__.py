"""CUDA C++ kernels of a few ops: plain functions with the signatures of the native ops, compiled at the first call.

Read `rowwise.cuh` first: one kernel that moves the bytes; then `math.cuh`, what is done to each number. The `.cu` files
say which function goes through that kernel, `bindings.cpp` what PyTorch sees, and `build.py` how it is compiled and
cached.

Tensors are float32, float16 or bfloat16 on one CUDA device; else a ValueError. A tensor whose rows lie at a regular
distance is read in place; any other that is not contiguous is copied. There is no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from nanovllm.kernels.cuda.build import cuda_support, load_library

__all__ = ["cuda_support", "fused_activation", "fused_add_gelu", "silu_and_mul"]

_KINDS = ("gelu", "gelu_tanh", "silu", "mish", "relu")
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32}


@dataclass(frozen=True)
class _Kernels:
    fused_add_gelu: Callable[..., None]
    fused_activation: Callable[..., None]
    silu_and_mul: Callable[..., None]


@cache
def compiled_kernels(device: torch.device) -> _Kernels:
    """The compiled kernels for a device."""
    reason = cuda_support(device)
    if reason is not None:
        raise ValueError(reason)
    library = load_library(torch.cuda.get_device_capability(device))
    return _Kernels(library.fused_add_gelu.default, library.fused_activation.default, library.silu_and_mul.default)


def _check_dtype(name: str, x: torch.Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: expected float16, bfloat16 or float32, not {x.dtype}")


def fused_add_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """The op `fused_add_gelu`."""
    if approximate not in _GELU:
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    _check_dtype("x", x)
    if bias.shape != x.shape and (bias.shape != x.shape[-1:] or not x.dim()):
        raise ValueError(f"bias: expected the shape {list(x.shape)} or {list(x.shape[-1:])}, not {list(bias.shape)}")
    if bias.dtype != x.dtype or bias.device != x.device:
        raise ValueError(f"bias: expected {x.dtype} on {x.device}, as x, not {bias.dtype} on {bias.device}")
    kernel = compiled_kernels(x.device).fused_add_gelu
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel(x, bias, y, _GELU[approximate])
    return y


def fused_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The op `fused_activation`."""
    if kind not in _KINDS:
        raise ValueError(f"kind: expected one of {', '.join(_KINDS)}, not {kind!r}")
    _check_dtype("x", x)
    kernel = compiled_kernels(x.device).fused_activation
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel(x, y, kind)
    return y


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The op `silu_and_mul`."""
    if not gate_up.dim() or gate_up.shape[-1] % 2:
        raise ValueError(
            f"gate_up: expected a last dimension of an even size (gate, then up), not the shape {list(gate_up.shape)}"
        )
    _check_dtype("gate_up", gate_up)
    kernel = compiled_kernels(gate_up.device).silu_and_mul
    y = torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    kernel(gate_up, y)
    return y
