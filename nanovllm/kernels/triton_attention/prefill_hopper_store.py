"""The output of the prefill kernel for Hopper: stored by the consumers, or by a warp for it alone while they compute on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nanovllm.kernels.triton_attention.prefill_hopper_items import DESCRIPTIONS, read_word
from nanovllm.kernels.triton_ops._gluon import reinterpret, warps_barrier


@gluon.constexpr_function
def row_layout(size):
    """Of the output's [64, size]: a thread holds pieces of eight columns, and a warp the rows that it has in a product's result."""
    columns = [[0, 32 << i] for i in range((size // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *columns], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, size],
    )  # fmt: skip


@gluon.jit
def store_output(
    out_ptr, acc, total, half, group, begin, num_tokens, HEADS: gl.constexpr, PACK: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM_PAD: gl.constexpr, WIDE: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """The output of a consumer's rows of an item; WIDE: 16 bytes at a time."""
    store_layout: gl.constexpr = row_layout(DIM_PAD) if WIDE else o_layout
    inverse = gl.where(total > 0, 1.0 / total, 0.0)  # a query that sees nothing gets zeros
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
    o = gl.convert_layout(o.to(out_ptr.dtype.element_ty), store_layout)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, store_layout))
    dims = gl.arange(0, DIM_PAD, layout=gl.SliceLayout(0, store_layout))
    token = half * (64 // PACK) + rows // PACK
    live = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    row = (begin + token).to(gl.int64) * HEADS + group * PACK + rows % PACK
    gl.store((out_ptr + row * HEAD_DIM)[:, None] + dims[None, :], o, mask=live)


@gluon.jit
def hand_over(buffer, handed, acc, total, o_layout: gl.constexpr):
    """The output of a consumer's rows of an item, into its own queries of that item, which it needs no more."""
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
    buffer.store(o.to(buffer.dtype))
    warps_barrier()
    mbarrier.arrive(handed, count=1)


@gluon.jit
def store_handed(
    buffers, described, handed, q_empty, out_ptr, HEADS: gl.constexpr, PACK: gl.constexpr, HEAD_DIM: gl.constexpr, DIM_PAD: gl.constexpr,
    CHUNK: gl.constexpr, QUERIES: gl.constexpr, HAND_OVER: gl.constexpr,
):  # fmt: skip
    """One warp: stores what the consumers hand over, and says that the next queries may come there."""
    if HAND_OVER:
        q_buffers, _, _, items = buffers
        scalar: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        LAYOUT: gl.constexpr = q_buffers.layout
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // CHUNK, CHUNK // 8], [1, 1], [1, 0])
        rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        dims = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
        count_items = 0
        mbarrier.wait(described.index(0), 0)
        num_tokens = read_word(items, 0, 4, scalar)
        while num_tokens > 0:
            group = read_word(items, count_items, 0, scalar)
            begin = read_word(items, count_items, 3, scalar)
            slot = count_items % QUERIES
            for half in range(2):
                # In memory a tile is columns of CHUNK elements, and eight rows of one are contiguous.
                buffer = q_buffers.index(2 * slot + half)
                pieces = reinterpret(buffer, buffer.dtype, [DIM_PAD // CHUNK * 8, 8, CHUNK], LAYOUT)
                mbarrier.wait(handed.index(2 * slot + half), count_items // QUERIES & 1)
                for eight in range(8):
                    row = half * 64 + eight * 8 + rows
                    live = row // PACK < num_tokens
                    at = out_ptr + ((begin + row // PACK).to(gl.int64) * HEADS + group * PACK + row % PACK) * HEAD_DIM
                    for column in gl.static_range(DIM_PAD // CHUNK):
                        o = pieces.index(column * 8 + eight).load(layout)
                        dim = column * CHUNK + dims
                        gl.store(at[:, None] + dim[None, :], o, mask=live[:, None] & (dim < HEAD_DIM)[None, :])
                # The copy engine may write where this warp has read.
                fence_async_shared()
                warps_barrier()
                mbarrier.arrive(q_empty.index(slot), count=1)
            count_items += 1
            mbarrier.wait(described.index(count_items % DESCRIPTIONS), count_items // DESCRIPTIONS & 1)
            num_tokens = read_word(items, count_items, 4, scalar)
