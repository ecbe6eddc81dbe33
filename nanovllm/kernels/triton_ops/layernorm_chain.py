"""gelu(dropout(layer_norm(x) + residual)) in one kernel: one read of x and residual, one write."""

import struct
from functools import cache

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._launch import matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton_ops._math import activation, round2, rounded, to_dtype, wide
from nanovllm.kernels.triton_ops.activation import gelu_kind
from nanovllm.kernels.triton_ops.philox import philox_words
from nanovllm.kernels.triton_ops.pieces import MANY_ROWS, load_pieces, pieces_of, warps_of_pieces

_MAX_BLOCK = 32768
_MOST_PIECES = 5


@triton.jit(do_not_specialize=["seed_low", "seed_high", "limit"])
def _chain_kernel(
    x, residual, weight, bias, y, x_stride, residual_stride, size, eps, limit, scale, seed_low, seed_high,
    DROPOUT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """EVEN: PIECES * BLOCK = size. limit: dropout keeps where the random word, as uint32, is above it."""
    dtype: tl.constexpr = y.dtype.element_ty
    index = tl.program_id(0)
    row = index.to(tl.int64)
    col = tl.arange(0, BLOCK)
    loaded = load_pieces(x + row * x_stride, col, size, BLOCK, PIECES, EVEN, False)
    others = load_pieces(residual + row * residual_stride, col, size, BLOCK, PIECES, EVEN, False)
    weights = load_pieces(weight, col, size, BLOCK, PIECES, EVEN, False)
    biases = load_pieces(bias, col, size, BLOCK, PIECES, EVEN, False)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        total += wide(loaded[i])
    mean = tl.sum(total, 0) / size
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        v = wide(loaded[i]) - mean
        if not EVEN:
            v = tl.where(i * BLOCK + col < size, v, 0.0)
        total += v * v
    factor = tl.rsqrt(tl.sum(total, 0) / size + eps)
    for i in tl.static_range(PIECES):
        place = i * BLOCK + col
        v = (wide(loaded[i]) - mean) * factor * wide(weights[i]) + wide(biases[i])
        v = wide(to_dtype(rounded(v, dtype) + others[i].to(tl.float32), dtype))
        if DROPOUT:
            words = philox_words(i * (BLOCK // 4), index, seed_low.to(tl.uint32), seed_high.to(tl.uint32), BLOCK)
            v = tl.where(words > limit.to(tl.uint32), round2(v * scale, dtype), 0.0)
        v = to_dtype(activation(v, KIND, dtype), dtype)
        if EVEN:
            tl.store(y + row * size + place, v)
        else:
            tl.store(y + row * size + place, v, place < size)


def _float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


@cache
def _dropout_limit(p: float) -> int:
    """The largest word w with `philox.uniform`(w) < p, or -1: uniform(w) >= p is w > limit, since uniform never falls."""
    least = _float32(p)
    low, high = -1, 2**32 - 1  # low drops, or is -1
    while low < high:
        middle = (low + high + 1) // 2
        drops = min(max(_float32(middle), 0.5), 4294967040.0) * 2.0**-32 < least
        low, high = (middle, high) if drops else (low, middle - 1)
    return low


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
        pieces, warps = 1, warps_for(block, 8 if rows <= MANY_ROWS else 16)
        cut = warps_of_pieces(size, _MOST_PIECES) if rows > MANY_ROWS else 0
        if cut:
            pieces, warps = pieces_of(size, cut, _MOST_PIECES), cut
            block = size // pieces
        limit = _dropout_limit(p)
        _chain_kernel[(rows,)](
            x, residual, weight, bias, y, x_stride, residual_stride, size, eps, _signed(limit), 1.0 / (1.0 - p) if p < 1 else 0.0,
            _signed(seed), _signed(seed >> 32), limit >= 0, kind, block, pieces, pieces * block == size, num_warps=warps,
        )  # fmt: skip
    return y


def _signed(word: int) -> int:
    """The low 32 bits of an integer as the int32 with the same bits, so that the kernel's signature never changes."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
