"""gelu(dropout(layer_norm(x) + residual)) in one kernel: one read of x and residual, one write."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._launch import matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton_ops._math import activation, rounded, to_dtype
from nanovllm.kernels.triton_ops.activation import gelu_kind
from nanovllm.kernels.triton_ops.philox import philox_words, uniform

_MAX_BLOCK = 32768


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _chain_kernel(
    x, residual, weight, bias, y, x_stride, residual_stride, size, eps, p, scale, seed_low, seed_high,
    DROPOUT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    index = tl.program_id(0)
    row = index.to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < size
    v = tl.load(x + row * x_stride + col, mask, other=0.0).to(tl.float32)
    r = tl.load(residual + row * residual_stride + col, mask, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask, other=0.0).to(tl.float32)
    b = tl.load(bias + col, mask, other=0.0).to(tl.float32)
    v = tl.where(mask, v - tl.sum(v, 0) / size, 0.0)
    v = rounded(v * tl.rsqrt(tl.sum(v * v, 0) / size + eps) * w + b, dtype)
    v = rounded(v + r, dtype)
    if DROPOUT:
        u = uniform(philox_words(0, index, seed_low.to(tl.uint32), seed_high.to(tl.uint32), BLOCK))
        v = tl.where(u >= p, rounded(v * scale, dtype), 0.0)
    tl.store(y + row * size + col, to_dtype(activation(v, KIND, dtype), dtype), mask)


def layernorm_residual_dropout_gelu(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    p: float = 0.0,
    seed: int = 0,
    approximate: str = "none",
) -> torch.Tensor:
    """The op `layernorm_residual_dropout_gelu`. Takes row-strided matrices; copies other non-contiguous tensors.

    Raises:
        ValueError: p outside [0, 1], an unknown approximation, or rows of more than 32768 elements.
    """
    kind = gelu_kind(approximate)
    if not 0 <= p <= 1:
        raise ValueError(f"p: expected a probability in [0, 1], not {p}")
    size = x.shape[-1]
    block = max(4, next_power_of_2(size))  # dropout draws four words at a time
    if block > _MAX_BLOCK:
        raise ValueError(f"x: expected rows of at most {_MAX_BLOCK} elements, not {size}")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows, x_stride = matrix_of(x)
    residual, _, residual_stride = matrix_of(residual)
    if rows:
        _chain_kernel[(rows,)](
            x, residual, weight, bias, y, x_stride, residual_stride, size, eps, p, 1.0 / (1.0 - p) if p < 1 else 0.0,
            _signed(seed), _signed(seed >> 32), p > 0, kind, block, num_warps=warps_for(block, 8 if rows <= 1024 else 16),
        )  # fmt: skip
    return y


def _signed(word: int) -> int:
    """The low 32 bits of an integer as the int32 with the same bits, so that the kernel's signature never changes."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
