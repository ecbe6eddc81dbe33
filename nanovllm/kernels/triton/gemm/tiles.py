"""The inner loops and the epilogue of the matrix kernels.

A weight is [n, k], as in torch.nn.Linear. `*_rows` are pointers to the starts of rows, `*_live` says which rows exist.
Sums are float32. PRECISION is how float32 operands are multiplied: "ieee" or "tf32".
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.device_math import INTERPRETED, activation, to_dtype

if INTERPRETED:
    # The interpreter multiplies the bits of bfloat16 as integers.
    @triton.jit
    def dot(a, b, acc, PRECISION: tl.constexpr):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
else:

    @triton.jit
    def dot(a, b, acc, PRECISION: tl.constexpr):
        """acc + a @ b, on the tensor cores unless the operands are float32 and PRECISION is "ieee"."""
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def weight_rows(first, n, ROWS: tl.constexpr, GATED: tl.constexpr):
    """(rows, live): the ROWS rows of a weight for the outputs from `first` on.

    GATED: n is half the rows of the weight. A row of the gate and one of the up projection alternate.
    """
    r = tl.arange(0, ROWS)
    if GATED:
        unit = first + r // 2
        return unit + (r % 2) * n, unit < n
    else:
        return first + r, first + r < n


@triton.jit
def load_tile(pointers, rows_live, cols_live, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """A tile; zero where a mask is in use and false."""
    if MASK_ROWS and MASK_COLS:
        return tl.load(pointers, rows_live[:, None] & cols_live[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, rows_live[:, None], other=0.0)
    elif MASK_COLS:
        return tl.load(pointers, cols_live[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def multiply_vector(
    w_rows, w_live, x, first, end, stride_wk, stride_xk,
    BLOCK_K: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """w[rows, first:end] @ x[first:end]: [rows]. For one token, where only the loads of w count.

    EARLY: the kernel before may still write x, but not w. Each tile of w is loaded a step ahead, the first before the
    wait.
    """
    cols = tl.arange(0, BLOCK_K)
    acc = tl.zeros([w_rows.shape[0], BLOCK_K], tl.float32)
    if EARLY:
        k = first + cols
        ahead = load_tile(w_rows[:, None] + (k * stride_wk)[None, :], w_live, k < end, MASK_ROWS, True)
        gdc_wait()
        gdc_launch_dependents()
        for start in range(first, end, BLOCK_K):
            k = start + cols
            v = tl.load(x + k * stride_xk, k < end, other=0.0)
            w = ahead
            k += BLOCK_K
            ahead = load_tile(w_rows[:, None] + (k * stride_wk)[None, :], w_live, k < end, MASK_ROWS, True)
            acc += w.to(tl.float32) * v.to(tl.float32)[None, :]
    else:
        for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
            k = start + cols
            w = load_tile(w_rows[:, None] + (k * stride_wk)[None, :], w_live, k < end, MASK_ROWS, MASK_K)
            if MASK_K:
                v = tl.load(x + k * stride_xk, k < end, other=0.0)
            else:
                v = tl.load(x + k * stride_xk)
            acc += w.to(tl.float32) * v.to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def multiply_tile(
    a_rows, a_live, b_rows, b_live, first, end, stride_ak, stride_bk,
    BLOCK_K: tl.constexpr, MASK_A: tl.constexpr, MASK_B: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """a[rows, first:end] @ b[rows, first:end]^T: [rows of a, rows of b]."""
    cols = tl.arange(0, BLOCK_K)
    acc = tl.zeros([a_rows.shape[0], b_rows.shape[0]], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        k = start + cols
        a = load_tile(a_rows[:, None] + (k * stride_ak)[None, :], a_live, k < end, MASK_A, MASK_K)
        b = load_tile(b_rows[:, None] + (k * stride_bk)[None, :], b_live, k < end, MASK_B, MASK_K)
        acc = dot(a, tl.trans(b), acc, PRECISION)
    return acc


@triton.jit
def multiply_two_tiles(
    a_rows, a_live, b_rows, c_rows, b_live, first, end, stride_ak, stride_bk,
    BLOCK_K: tl.constexpr, MASK_A: tl.constexpr, MASK_B: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(a @ b^T, a @ c^T), reading a once. b and c are rows of one matrix."""
    cols = tl.arange(0, BLOCK_K)
    acc_b = tl.zeros([a_rows.shape[0], b_rows.shape[0]], tl.float32)
    acc_c = tl.zeros([a_rows.shape[0], c_rows.shape[0]], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        k = start + cols
        a = load_tile(a_rows[:, None] + (k * stride_ak)[None, :], a_live, k < end, MASK_A, MASK_K)
        b = load_tile(b_rows[:, None] + (k * stride_bk)[None, :], b_live, k < end, MASK_B, MASK_K)
        c = load_tile(c_rows[:, None] + (k * stride_bk)[None, :], b_live, k < end, MASK_B, MASK_K)
        acc_b = dot(a, tl.trans(b), acc_b, PRECISION)
        acc_c = dot(a, tl.trans(c), acc_c, PRECISION)
    return acc_b, acc_c


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile row, tile column) of a program: GROUP_M rows of tiles at a time, so that concurrent ones share operands."""
    per_group = GROUP_M * tiles_n
    first = index // per_group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    return first + index % per_group % rows, index % per_group // rows


@triton.jit
def finish(acc, bias, cols, n, KIND: tl.constexpr, GATED: tl.constexpr, dtype: tl.constexpr):
    """The outputs of sums [rows, cols] in float32, with bias (or None) and activation. GATED: [rows, cols // 2]."""
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
        return activation(gate, KIND, dtype) * up
    else:
        if bias is not None:
            acc += tl.load(bias + cols, cols < n, other=0.0).to(tl.float32)[None, :]
        if KIND == "none":
            return acc
        else:
            return activation(acc, KIND, dtype)


@triton.jit
def store_sums(
    acc, bias, out, rows, first, m, n, split, KIND: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """Finish and store sums [rows, cols] of the outputs from column `first` on. `rows` are rows of the output.

    GATED: sums of the gate and of the up projection alternate. SPLIT: the sums are partial. They are stored as they are
    in out[split], [m, n or if GATED 2 n] float32, and `add_splits` finishes them.
    """
    if SPLIT:
        width = n
        if GATED:
            width = 2 * n
            first = 2 * first
        cols = first + tl.arange(0, acc.shape[1])
        out += tl.cast(split, tl.int64) * m * width
        y = acc
    else:
        dtype: tl.constexpr = out.dtype.element_ty
        width = n
        WIDTH: tl.constexpr = acc.shape[1] // 2 if GATED else acc.shape[1]
        cols = first + tl.arange(0, WIDTH)
        y = to_dtype(finish(acc, bias, cols, n, KIND, GATED, dtype), dtype)
    tl.store(out + rows.to(tl.int64)[:, None] * width + cols[None, :], y, (rows < m)[:, None] & (cols < width)[None, :])
