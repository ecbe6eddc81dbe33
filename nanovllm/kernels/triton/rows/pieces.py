"""Rows as exact tiles: a row of 5120 is 5 pieces of 1024 instead of one block of 8192 with three idle eighths.

A thread has 8 elements of every piece, and all of a row's loads are under way before the first is waited for. Where
there are many rows others hide what a reduction takes, and idle lanes are what costs. Where there are few, idle lanes
cost too if there is much arithmetic; then a thread has 4 elements, so that there are more warps.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import rounded, to_dtype, wide

MANY_ROWS = 1024
"""Above it rows are cut."""
_THREAD = 8
"""Elements of a piece that a thread has: 16 bytes of 16-bit numbers."""

_MOST_FEW = 7
"""Pieces of rows where there are few."""


def pieces_of(size: int, warps: int, most: int) -> int:
    """How many pieces of 8 elements a thread make up a row exactly, if at least 2 and at most `most` (of registers);
    else 0."""
    block = 32 * _THREAD * warps
    pieces = size // block
    return pieces if size % block == 0 and 2 <= pieces <= most and warps <= 8 else 0


def few_pieces(size: int) -> tuple[int, int] | None:
    """(pieces, warps) of rows where there are few, 4 elements of every piece a thread; None: one block, or pieces
    that are too small."""
    block = max(1, size & -size)
    pieces = size // block
    return (pieces, max(1, min(16, block // 128))) if 2 <= pieces <= _MOST_FEW and block >= 256 else None


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
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def layer_statistics(x, tiles, col, size, eps, BLOCK: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr):
    """(centre, mean, scale) of a row at x, also given as tiles: its layer norm is (v - centre - mean) * scale.

    E[v^2] - E[v]^2 would cancel for a mean far from zero. Of v - centre, the mean of the first elements, it does not:
    the square of that mean is at most (size / 32 - 1) variances, whatever the row, and a few of them but for
    contrived ones. So both sums need one exchange between the warps instead of two. 16-bit results lose nothing that
    shows (the scale is off by 2.4e-5 at most, in the worst rows tried); float32 results, of which more is expected,
    take the second pass over registers.
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
    """A tile of a row, normalised. EXACT: v - centre is, where v is far from zero and near it; else centre + mean is
    rounded, which takes a register less."""
    centre, mean, scale = statistics
    if EXACT:
        # The same centre, but not to the compiler, which would keep all of v - centre in registers rather than
        # subtract again.
        return (wide(v) - (centre + 0.0 * mean)) * scale + (-mean * scale)
    else:
        return (wide(v) - (centre + mean)) * scale


@triton.jit
def norm_pieces_kernel(
    x, weight, bias, y, inner, outer_stride, inner_stride, size, eps,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, LAYER: tl.constexpr, MANY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The layer norm (LAYER) or RMS norm of one row a program. MANY: neither x nor y is to stay in the cache.

    DEPENDENT: launched before the kernel that writes x has ended.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x += (row // inner) * outer_stride + (row % inner) * inner_stride
    loaded = load_pieces(x, col, size, BLOCK, PIECES, True, MANY)
    # Before the reduction, whose latency hides it.
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
