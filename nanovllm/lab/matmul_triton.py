"""a @ b in Triton: a program is a tile of the result; the compiler pipelines loads and picks instructions."""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    # Programs in groups of GROUP tile rows, down each column of a group: neighbours share tiles in the L2 cache.
    tile_rows, tile_cols = tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = tl.program_id(0) // (GROUP * tile_cols) * GROUP
    in_group = tl.minimum(GROUP, tile_rows - first)
    within = tl.program_id(0) % (GROUP * tile_cols)
    row = ((first + within % in_group) * BM + tl.arange(0, BM)).to(tl.int64)
    col = ((within // in_group) * BN + tl.arange(0, BN)).to(tl.int64)
    sums = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        step = start + tl.arange(0, BK)
        tile_a = tl.load(a + row[:, None] * k + step[None, :], (row < m)[:, None] & (step < k)[None, :], other=0.0)
        tile_b = tl.load(
            b + step[:, None].to(tl.int64) * n + col[None, :], (step < k)[:, None] & (col < n)[None, :], other=0.0
        )
        sums = tl.dot(tile_a, tile_b, sums)
    tl.store(c + row[:, None] * n + col[None, :], sums.to(c.dtype.element_ty), (row < m)[:, None] & (col < n)[None, :])
