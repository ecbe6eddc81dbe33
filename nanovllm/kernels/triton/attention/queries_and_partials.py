"""Queries and partial results, which the attention kernels share beside the walk over tiles (`attend.py`).

A partial result is (acc, m, total), as in `attend.py`. Partials merge in the order of their pieces, whichever
program merges them, so the bits do not depend on which program arrives last.
"""

import triton
import triton.language as tl


@triton.jit
def repeated(x, ROWS: tl.constexpr):
    """The rows of x [n, size] again and again: [ROWS, size]. Where only the first n of a product's rows are wanted."""
    if ROWS > x.shape[0]:
        x = tl.broadcast_to(x[None, :, :], [ROWS // x.shape[0], x.shape[0], x.shape[1]])
        x = tl.reshape(x, [ROWS, x.shape[2]])
    return x


@triton.jit
def load_queries(
    q_ptr, stride_head, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr
):
    """The query heads of one KV head as the rows of a tile: [ROWS, DIM_PAD], zero beyond GROUP and HEAD_DIM."""
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    return tl.load(q_ptr + rows * stride_head + dims, mask=(rows < GROUP) & (dims < HEAD_DIM), other=0.0)


@triton.jit
def load_query_tokens(
    q_ptr,
    stride_token,
    stride_head,
    count,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """As `load_queries`, of `count` tokens, one after the other: row r is head r % GROUP of token r // GROUP."""
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    q_rows = q_ptr + rows // GROUP * stride_token + rows % GROUP * stride_head
    return tl.load(q_rows + dims, mask=(rows < count * GROUP) & (dims < HEAD_DIM), other=0.0)


@triton.jit
def store_tokens(out_ptr, value, stride_token, count, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The rows of `load_query_tokens`; the heads of a token lie side by side."""
    rows = tl.arange(0, value.shape[0])[:, None]
    dims = tl.arange(0, value.shape[1])[None, :]
    mask = (rows < count * GROUP) & (dims < HEAD_DIM)
    out_rows = out_ptr + rows // GROUP * stride_token + rows % GROUP * HEAD_DIM
    tl.store(out_rows + dims, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(out_ptr, value, stride_row, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    rows = tl.arange(0, value.shape[0])[:, None]
    dims = tl.arange(0, value.shape[1])[None, :]
    mask = (rows < GROUP) & (dims < HEAD_DIM)
    tl.store(out_ptr + rows * stride_row + dims, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_partial(acc_ptr, ml_ptr, index, acc, m, total, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """acc_ptr [slots, GROUP, HEAD_DIM] float32, ml_ptr [slots, 2, GROUP] float32."""
    store_rows(acc_ptr + index * GROUP * HEAD_DIM, acc, HEAD_DIM, GROUP, HEAD_DIM)
    rows = tl.arange(0, acc.shape[0])
    tl.store(ml_ptr + index * 2 * GROUP + rows, m, mask=rows < GROUP)
    tl.store(ml_ptr + index * 2 * GROUP + GROUP + rows, total, mask=rows < GROUP)


@triton.jit
def merge_partials(
    acc_ptr, ml_ptr, first, step, count, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, CHUNK: tl.constexpr, EMPTY: tl.constexpr = False,
):  # fmt: skip
    """The merged output [GROUP_PAD, DIM_PAD] of `count` partials; partial i has the slot first + i * step.

    EMPTY: a row may have found nothing in a piece, and if in none it gets zeros.
    """
    groups = tl.minimum(tl.arange(0, GROUP_PAD), GROUP - 1)
    dims = tl.arange(0, DIM_PAD)
    m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        slots = first + i * step
        live = (i < count)[:, None]
        # Other programs wrote these: the first-level cache, which is not coherent, is passed by.
        ml = ml_ptr + slots[:, None] * (2 * GROUP) + groups[None, :]
        part_m = tl.load(ml, mask=live, other=float("-inf"), cache_modifier=".cg")  # [CHUNK, GROUP_PAD]
        part_total = tl.load(ml + GROUP, mask=live, other=0.0, cache_modifier=".cg")
        rows = slots[:, None] * GROUP + groups[None, :]
        part_acc = tl.load(
            acc_ptr + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = tl.maximum(m, tl.max(part_m, 0))
        base = new_m
        if EMPTY:
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
        alpha = tl.exp2(m - base)
        weights = tl.exp2(part_m - base[None, :])
        # Selected once more, or the compiler fuses a product with the addition of another lane's: each lane would round
        # its own product less than the other's, and the copies of a sum that several lanes hold would not be equal.
        total = total * alpha + tl.sum(tl.where(live, part_total * weights, 0.0), 0)
        acc = acc * alpha[:, None] + tl.sum(tl.where(live[:, :, None], part_acc * weights[:, :, None], 0.0), 0)
        m = new_m
    if EMPTY:
        return normalised(acc, total)
    return acc / total[:, None]


@triton.jit
def normalised(acc, total):
    """Zeros for rows that saw no token."""
    return tl.where(total[:, None] == 0.0, 0.0, acc / total[:, None])
