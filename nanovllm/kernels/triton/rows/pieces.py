"""Rows as exact tiles: a row of 5120 is 5 pieces of 1024 instead of one block of 8192 with three idle eighths.

All loads of a row are under way before the first is waited for. With many rows a thread has 8 elements of each piece.
With few rows it has 4, so that more warps share the arithmetic.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import rounded, to_dtype, wide

_THREAD = 8  # elements of a piece that a thread has of one of many rows: 16 bytes of 16-bit numbers
_MOST_FEW = 7  # pieces of each of few rows


def cut_of_many(size: int, most: int, warps: int | None = None) -> tuple[int, int] | None:
    """(pieces, warps) of each of many rows; None: a row is not 2 to `most` pieces exactly. `warps`: only with these."""
    for number in (warps,) if warps else (4, 2, 1, 8):
        block = 32 * _THREAD * number
        pieces = size // block
        if size % block == 0 and 2 <= pieces <= most and number <= 8:
            return pieces, number
    return None


def cut_of_few(size: int) -> tuple[int, int] | None:
    """(pieces, warps) of each of few rows; None: a row is one block, or its pieces would be too small."""
    block = max(1, size & -size)
    pieces = size // block
    return (pieces, max(1, min(16, block // 128))) if 2 <= pieces <= _MOST_FEW and block >= 256 else None


@triton.jit
def load_pieces(source, col, size, BLOCK: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr):
    """A row as PIECES tiles of BLOCK. EVEN: the tiles are the row exactly; else elements beyond its end are 0."""
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
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def layer_statistics(x, tiles, col, size, eps, BLOCK: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr):
    """(centre, mean, scale) of a row at x, also given as tiles: its layer norm is (v - centre - mean) * scale.

    The centre is the mean of the first 32 elements. E[v^2] - E[v]^2 cancels if the mean is far from zero. With v -
    centre it does not: the squared mean of that is at most size / 32 - 1 variances. So both sums take one exchange
    between the warps. The scale is off by at most 2.4e-5, which 16-bit results do not show. For float32 results the
    variance takes a second pass over registers.
    """
    first = tl.arange(0, 32)
    centre = tl.sum(tl.load(x + first, first < size, other=0.0).to(tl.float32), 0) / tl.minimum(size, 32)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):
        v = wide(tiles[i]) - centre
        if not EVEN:
            v = tl.where(i * BLOCK + col < size, v, 0.0)
        total += v
        squares += v * v
    if x.dtype.element_ty == tl.float32:
        mean = tl.sum(total, 0) / size
        squares = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            v = (wide(tiles[i]) - centre) - mean
            if not EVEN:
                v = tl.where(i * BLOCK + col < size, v, 0.0)
            squares += v * v
        variance = tl.sum(squares, 0) / size
    else:
        sums = tl.reduce((total, squares), 0, _add_both)
        mean = sums[0] / size
        variance = sums[1] / size - mean * mean
    return centre, mean, tl.rsqrt(variance + eps)


@triton.jit
def layer_normed(v, statistics, EXACT: tl.constexpr):
    """A tile of a row, normalised. EXACT: v - centre is not rounded if v is near the centre. Else centre + mean is
    rounded, which takes a register less.
    """
    centre, mean, scale = statistics
    if EXACT:
        # The same centre, but the compiler does not know: it would keep all of v - centre in registers.
        return (wide(v) - (centre + 0.0 * mean)) * scale + (-mean * scale)
    else:
        return (wide(v) - (centre + mean)) * scale


@triton.jit
def norm_pieces_kernel(
    x, weight, bias, y, inner, outer_stride, inner_stride, size, eps,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, LAYER: tl.constexpr, MANY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The layer norm (LAYER) or RMS norm of one row a program.

    MANY: x and y do not stay in the cache. DEPENDENT: launched before the kernel that writes x has ended.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x += (row // inner) * outer_stride + (row % inner) * inner_stride
    loaded = load_pieces(x, col, size, BLOCK, PIECES, True, MANY)
    # The latency of the reduction hides this load.
    weights = load_pieces(weight, col, size, BLOCK, PIECES, True, False)
    if LAYER:
        biases = load_pieces(bias, col, size, BLOCK, PIECES, True, False)
        statistics = layer_statistics(x, loaded, col, size, eps, BLOCK, PIECES, True)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            v = loaded[i].to(tl.float32)
            total += v * v
        scale = tl.rsqrt(tl.sum(total, 0) / size + eps)
    for i in tl.static_range(PIECES):
        if LAYER:
            v = layer_normed(loaded[i], statistics, True) * weights[i].to(tl.float32) + biases[i].to(tl.float32)
        else:
            v = rounded(loaded[i].to(tl.float32) * scale, dtype) * weights[i].to(tl.float32)
        tl.store(y + row * size + (i * BLOCK + col), to_dtype(v, dtype), cache_modifier=".cs" if MANY else "")
