"""Results of the decode kernel for Hopper: those of a program's warps, and partial ones of a sequence's pieces, merged
and stored.

What `queries_and_partials.py` is for the kernels in Triton, with the layouts that Gluon wants to be told.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.triton.attention.attend import finite
from nanovllm.kernels.triton.attention.decode_hopper_cluster import load_rows, load_sums
from nanovllm.kernels.triton.gluon_compat import warps_barrier


@gluon.jit
def merge_warps(acc, m, total, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, rows_layout: gl.constexpr):
    """The warps' results (acc [WARPS, HEAD_DIM, 8], m [WARPS, 8], total [WARPS, 16, 8]) -> (acc [8, HEAD_DIM], m
    [8], total [8]).
    """
    layout: gl.constexpr = gl.BlockedLayout([WARPS, HEAD_DIM // 16, 1], [1, 16, 2], [1, 1, WARPS], [1, 2, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, rows_layout)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, layout))
    m = gl.convert_layout(m, gl.SliceLayout(1, layout))
    acc = gl.convert_layout(acc, layout)
    new_m = gl.max(m, 0)
    weights = gl.exp2(m - finite(new_m)[None, :])
    total = gl.sum(total * weights, 0)
    acc = gl.permute(gl.sum(acc * weights[:, None, :], 0), [1, 0])
    acc = gl.convert_layout(acc, rows_layout, assert_trivial=True)
    new_m = gl.convert_layout(new_m, row_layout, assert_trivial=True)
    return acc, new_m, gl.convert_layout(total, row_layout, assert_trivial=True)


@gluon.jit
def store_rows(out_ptr, value, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The first GROUP rows of value [8, HEAD_DIM], one after the other."""
    layout: gl.constexpr = value.type.layout
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None]
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))[None, :]
    mask = gl.broadcast(rows < GROUP, dims >= 0)[0]
    gl.store(out_ptr + rows * HEAD_DIM + dims, value.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def store_partial(acc_ptr, ml_ptr, index, acc, m, total, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """acc_ptr [slots, GROUP, HEAD_DIM] float32, ml_ptr [slots, 2, GROUP] float32."""
    store_rows(acc_ptr + index * GROUP * HEAD_DIM, acc, GROUP, HEAD_DIM)
    rows = gl.arange(0, 8, layout=m.type.layout)
    gl.store(ml_ptr + index * 2 * GROUP + rows, m, mask=rows < GROUP)
    gl.store(ml_ptr + index * 2 * GROUP + GROUP + rows, total, mask=rows < GROUP)


@gluon.jit
def arrived_last(counter, pieces):
    """Whether this program is the last of a sequence's `pieces` to come here; then the counter is zero again."""
    # Every thread's stores come before the arrival, which one thread makes.
    warps_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def merge_partials(
    acc_ptr, ml_ptr, first, step, count, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CHUNK: gl.constexpr,
    rows_layout: gl.constexpr, WARPS: gl.constexpr, CLUSTER: gl.constexpr = 0,
):  # fmt: skip
    """The merged output [8, HEAD_DIM] of `count` partials, in order; partial i has the slot first + i * step.

    CLUSTER: they are in shared memory, in slots 0, 1, ... of the exchange `acc_ptr`; the bits are the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([CHUNK, 1, HEAD_DIM // 16], [1, 2, 16], [1, WARPS, 1], [2, 1, 0])
    ml_layout: gl.constexpr = gl.SliceLayout(2, layout)
    row_layout: gl.constexpr = gl.SliceLayout(0, ml_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))  # the same rows
    groups = gl.minimum(gl.arange(0, 8, layout=row_layout), GROUP - 1)[None, :]
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 1)
    m = gl.full([8], float("-inf"), gl.float32, row_layout)
    total = gl.zeros([8], gl.float32, row_layout)
    acc = gl.zeros([8, HEAD_DIM], gl.float32, gl.SliceLayout(0, layout))
    for start in range(0, count, CHUNK):
        i = start + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ml_layout))[:, None]
        if CLUSTER:
            live = gl.broadcast(i < count, groups >= 0)[0]
            all_live = gl.broadcast(gl.expand_dims(live, 2), dims >= 0)[0]
            rows = gl.minimum(i, count - 1) * GROUP + groups
            part_m, part_total = load_sums(acc_ptr, rows, CLUSTER, GROUP, HEAD_DIM)
            part_m = gl.where(live, part_m, float("-inf"))
            part_total = gl.where(live, part_total, 0.0)
            part_acc = gl.where(all_live, load_rows(acc_ptr, gl.expand_dims(rows * HEAD_DIM, 2) + dims), 0.0)
        else:
            slots = first + i * step
            ml = ml_ptr + slots * (2 * GROUP) + groups
            live = gl.broadcast(i < count, groups >= 0)[0]
            # Other programs wrote these: the first-level cache, which is not coherent, is passed by.
            part_m = gl.load(ml, mask=live, other=float("-inf"), cache_modifier=".cg")
            part_total = gl.load(ml + GROUP, mask=live, other=0.0, cache_modifier=".cg")
            pointers = acc_ptr + gl.expand_dims((slots * GROUP + groups) * HEAD_DIM, 2) + dims
            all_live = gl.broadcast(gl.expand_dims(live, 2), dims >= 0)[0]
            part_acc = gl.load(pointers, mask=all_live, other=0.0, cache_modifier=".cg")
        new_m = gl.maximum(m, gl.max(part_m, 0))
        alpha = gl.exp2(m - new_m)
        weights = gl.exp2(part_m - new_m[None, :])
        total = total * alpha + gl.sum(part_total * weights, 0)
        factor = gl.convert_layout(alpha, acc_rows, assert_trivial=True)
        acc = acc * factor[:, None] + gl.sum(part_acc * gl.expand_dims(weights, 2), 0)
        m = new_m
    total = gl.convert_layout(total, acc_rows, assert_trivial=True)
    return gl.convert_layout(acc / total[:, None], rows_layout, assert_trivial=True)
