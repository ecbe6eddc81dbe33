"""Partial results of the decode kernel for Hopper, exchanged within a cluster: from shared memory to shared memory.

The program of a sequence's first piece merges. The others send it their results and end; it waits for their bytes. Each
block has room for the results of all of its cluster, in a variable that Triton knows nothing of: a barrier first, then
`CLUSTER` times [GROUP, HEAD_DIM] float32, then as many times [GROUP, 2] float32, the maximum and the sum.

Other blocks may write to the merging block's shared memory once all blocks of the cluster have begun, for which `meet`
waits, until it ends, which is after all that it waits for. No block writes to the others, so they may end at any time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.triton.gluon_compat import warps_barrier


@gluon.constexpr_function
def _begin(size):
    # Dynamic shared memory comes after this, and the copy engine permutes by the bits of addresses: so the size is a
    # multiple of 1,024. What others have to see is the barrier, for which there is a fence of its own: one of all
    # memory would take longer.
    return f"""{{
        .shared .align 1024 .b8 exchange[{-(-size // 1024) * 1024}];
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 $0, exchange;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$0], 1;
        @first fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        }}"""


@gluon.jit
def begin_exchange(CLUSTER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """-> the address of the block's barrier. Once in a kernel, by all threads, and outside of loops."""
    SIZE: gl.constexpr = 16 + CLUSTER * GROUP * (HEAD_DIM + 2) * 4
    return gl.inline_asm_elementwise(_begin(SIZE), "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet():
    """All blocks of the cluster have begun their exchange. All threads, once."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _store(results, values, remote, repeats):
    """A thread's values, one after the other, to an address, 0 for nowhere; not by threads whose number has a bit of
    `repeats`.

    Operands: `results` that are nothing, `values`, and `results` each of addresses and barriers, of which the first
        counts.
    """
    address, barrier = results + values, 2 * results + values
    vector = ", ".join(f"${results + i}" for i in range(values))
    if remote:
        store = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v{values}.b32 [${address}], {{{vector}}}, [${barrier}];"  # noqa: E501
    else:
        store = f"st.shared.v{values}.b32 [${address}], {{{vector}}};"
    return f"""{{
        .reg .pred stores;
        .reg .b32 repeated;
        mov.u32 repeated, %tid.x;
        and.b32 repeated, repeated, {repeats};
        setp.eq.u32 stores, repeated, 0;
        setp.ne.and.u32 stores, ${address}, 0, stores;
        @stores {store}
        {" ".join(f"mov.b32 ${i}, 0;" for i in range(results))}
        }}"""


@gluon.jit
def _sums(exchange, CLUSTER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Where maxima and sums are."""
    return exchange + 16 + CLUSTER * GROUP * HEAD_DIM * 4


@gluon.jit
def _put(
    exchange, slot, acc, m, total, REMOTE: gl.constexpr, CLUSTER: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """acc [8, HEAD_DIM], m, total [8] into a slot; the first GROUP rows count.

    m and total are in all 16 lanes that have a row, and with 8 warps the upper four have again what the lower four
    have.
    """
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))[None, :]
    row = slot * GROUP + rows
    sums = gl.where(rows < GROUP, _sums(exchange, CLUSTER, GROUP, HEAD_DIM) + row * 8, 0)
    at = gl.where((rows < GROUP)[:, None] & (dims >= 0), exchange + 16 + row[:, None] * (HEAD_DIM * 4) + dims * 4, 0)
    gl.inline_asm_elementwise(
        _store(4, 4, REMOTE, -128), "=r,=r,=r,=r,f,f,f,f,r,r,r,r,r,r,r,r", [acc, at, exchange], dtype=gl.int32,
        is_pure=False, pack=4
    )  # fmt: skip
    gl.inline_asm_elementwise(
        _store(1, 2, REMOTE, -113), "=r,f,f,r,r", [m, total, sums, exchange], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def send_partial(
    exchange, rank, slot, acc, m, total, CLUSTER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """To a slot of the block `rank` of the cluster, which is another than this one."""
    there = gl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [exchange, rank], dtype=gl.int32, is_pure=True, pack=1
    )
    _put(there, slot, acc, m, total, True, CLUSTER, GROUP, HEAD_DIM)


@gluon.jit
def await_partials(exchange, count, acc, m, total, CLUSTER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """This block's own into slot 0, and `count` others into the next: until all are there."""
    _put(exchange, 0, acc, m, total, False, CLUSTER, GROUP, HEAD_DIM)
    warps_barrier()
    # What others send counts below zero until it is expected; the phase cannot end before this arrival.
    gl.inline_asm_elementwise(
        """{
        .reg .pred first, there;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$1], $2;
        waitExchange:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [$1], 0;
        @!there bra.uni waitExchange;
        mov.b32 $0, 0;
        }""",
        "=r,r,r", [exchange, count * (GROUP * (HEAD_DIM + 2) * 4)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_sums(exchange, rows, CLUSTER: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """(maxima, sums) of rows, slot * GROUP + query, of this block's exchange."""
    at = _sums(exchange, CLUSTER, GROUP, HEAD_DIM) + rows * 8
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=f,=f,r", [at], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def load_rows(exchange, elements):
    """acc's elements, (slot * GROUP + query) * HEAD_DIM + dim; a thread has at least 4 in a row."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r,r,r,r", [exchange + 16 + elements * 4],
        dtype=gl.float32,
        is_pure=False, pack=4,
    )  # fmt: skip
