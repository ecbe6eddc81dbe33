"""Rows as exact tiles: a row of 5120 is 5 pieces of 1024 instead of one block of 8192 with three idle eighths.

A thread has 8 elements of every piece, and all of a row's loads are under way before the first is waited for. Where there
are many rows others hide what a reduction takes, and idle lanes are what costs; where there are few, a block with more
warps is faster.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._math import rounded, to_dtype

MANY_ROWS = 1024
"""Above it rows are cut."""
_THREAD = 8
"""Elements of a piece that a thread has: 16 bytes of 16-bit numbers."""


def pieces_of(size: int, warps: int, most: int) -> int:
    """How many pieces of 8 elements a thread make up a row exactly, if at least 2 and at most `most` (of registers); else 0."""
    block = 32 * _THREAD * warps
    pieces = size // block
    return pieces if size % block == 0 and 2 <= pieces <= most and warps <= 8 else 0


def warps_of_pieces(size: int, most: int) -> int:
    """Warps with which `pieces_of` a row is not 0, 4 at best; 0: none."""
    return next((warps for warps in (4, 2, 1, 8) if pieces_of(size, warps, most)), 0)


@triton.jit
def load_pieces(source, col, size, BLOCK: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr):
    """A row as PIECES tiles of BLOCK. EVEN: without masks, since they are the row exactly; else 0 beyond its end."""
    policy: tl.constexpr = "evict_first" if STREAM else ""
    tiles = ()
    for i in tl.static_range(PIECES):
        place = i * BLOCK + col
        if EVEN:
            tiles = tiles + (tl.load(source + place, eviction_policy=policy),)
        else:
            tiles = tiles + (tl.load(source + place, place < size, other=0.0, eviction_policy=policy),)
    return tiles


@triton.jit
def norm_pieces_kernel(
    x, weight, bias, y, inner, outer_stride, inner_stride, size, eps,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """The layer norm (LAYER) or RMS norm of one row a program. Neither x nor y is to stay in the cache."""
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x += (row // inner) * outer_stride + (row % inner) * inner_stride
    loaded = load_pieces(x, col, size, BLOCK, PIECES, True, True)
    # Before the reduction, whose latency hides it.
    weights = load_pieces(weight, col, size, BLOCK, PIECES, True, False)
    if LAYER:
        biases = load_pieces(bias, col, size, BLOCK, PIECES, True, False)
    values = ()
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        v = loaded[i].to(tl.float32)
        if LAYER:
            total += v
        else:
            total += v * v
        values = values + (v,)
    if LAYER:
        # Two passes over registers: E[x^2] - E[x]^2 would cancel for a mean far from zero.
        mean = tl.sum(total, 0) / size
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            total += (values[i] - mean) * (values[i] - mean)
    scale = tl.rsqrt(tl.sum(total, 0) / size + eps)
    for i in tl.static_range(PIECES):
        if LAYER:
            v = (values[i] - mean) * scale * weights[i].to(tl.float32) + biases[i].to(tl.float32)
        else:
            v = rounded(values[i] * scale, dtype) * weights[i].to(tl.float32)
        tl.store(y + row * size + (i * BLOCK + col), to_dtype(v, dtype), cache_modifier=".cs")
