"""Prefill attention for Hopper: a persistent kernel of three specialised groups of warps, in the manner of
FlashAttention-3.

One warp loads (the producer); two warpgroups compute (the consumers), each for half of the query rows of a work item,
with the same keys and values. The producer takes items from a counter, so that every multiprocessor is busy until the
queue is empty, and runs ahead of the consumers: the next item's queries and first keys arrive while they are at the
last tiles of one. A consumer issues the product of queries and keys of one tile together with that of probabilities and
values of the tile before, which may be the last of the item before, and does its softmax while the tensor cores work.

It is written in Gluon, Triton's lower level, since Triton itself neither splits warps by role nor overlaps the softmax
of one tile with the product of another on this architecture.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nanovllm.kernels.triton.attention.prefill_hopper_compute import consume
from nanovllm.kernels.triton.attention.prefill_hopper_load import produce
from nanovllm.kernels.triton.gluon_compat import warps_barrier


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@gluon.jit(
    do_not_specialize=["num_seqs", "table_stride", "items_per_head", "num_items"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lens_ptr", "counter_ptr"],
)
def prefill_hopper_kernel(
    out_ptr,  # [num_tokens, HEADS, HEAD_DIM]
    q_descriptor,  # boxes of [64 // PACK, PACK, DIM_PAD]
    k_descriptor,  # boxes of [min(BLOCK_SIZE, TILE), 1, 64] of [slots, KV heads, HEAD_DIM]
    v_descriptor,
    table_ptr,
    starts_ptr,
    lens_ptr,
    counter_ptr,  # two zeros, and zeros again afterwards
    num_seqs,
    table_stride,
    items_per_head,
    num_items,
    scale,
    HEADS: gl.constexpr,
    PACK: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DIM_PAD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    QUERIES: gl.constexpr,  # items whose queries are in shared memory at a time: 1 or 2
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    WIDE: gl.constexpr,  # 16 bytes of the output at a time, by way of 2 KiB of shared memory for a consumer
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Grid [programs]: each takes items until the queue, head groups x items_per_head, is empty.

    An item is up to 128 // PACK query tokens of one sequence under PACK query heads of one KV head; row r of its tile
    is the token r // PACK under head r % PACK.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    CHUNK: gl.constexpr = 64
    kv_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    info_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffers = gl.allocate_shared_memory(dtype, [2 * QUERIES, 64, DIM_PAD], kv_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM_PAD], kv_layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM_PAD], kv_layout)
    info = gl.allocate_shared_memory(gl.int32, [4 * QUERIES, 1], info_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], barrier_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], barrier_layout)
    v_landed = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    mbarrier.init(v_landed, count=1)
    for slot in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    warps_barrier()
    buffers = (q_buffers, k_buffers, v_buffers, info)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed)
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), buffers, barriers, out_ptr, scale, HEADS, PACK, HEAD_DIM, DIM_PAD, TILE, STAGES,
            QUERIES,
                       SOFT_CAP, WINDOW, WIDE)),
            (consume, (gl.constexpr(1), buffers, barriers, out_ptr, scale, HEADS, PACK, HEAD_DIM, DIM_PAD, TILE, STAGES,
            QUERIES,
                       SOFT_CAP, WINDOW, WIDE)),
            (produce, (buffers, barriers, (q_descriptor, k_descriptor, v_descriptor), table_ptr, starts_ptr, lens_ptr,
            counter_ptr,
                       num_seqs, table_stride, items_per_head, num_items, PACK, GROUP, DIM_PAD, CHUNK, BLOCK_SIZE,
                       TILE, STAGES, QUERIES, WINDOW)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
