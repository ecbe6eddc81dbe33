"""Prefill attention for Hopper: a persistent kernel of three specialised groups of warps, in the manner of FlashAttention-3.

One warp loads (the producer); two warpgroups compute (the consumers), each for half of the query rows of a work item, with the
same keys and values. The producer takes items from a counter, so that every multiprocessor is busy until the queue is
empty, and runs ahead of the consumers: the next item's queries, keys and values arrive while they finish the last one. A
consumer issues the product of queries and keys of one tile together with that of probabilities and values of the tile
before, and does its softmax while the tensor cores work.

It is written in Gluon, Triton's lower level, since Triton itself neither splits warps by role nor overlaps the softmax of
one tile with the product of another on this architecture.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.triton_attention.prefill_hopper_load import produce, tile_range
from nanovllm.kernels.triton_ops._gluon import warps_barrier


@gluon.jit
def softmax(
    scores, m, total, positions, tile, scale, MASKED: gl.constexpr, TILE: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Scores of a tile -> (probabilities, m, total, what to multiply the output so far by); m is in scaled units, base 2."""
    if SOFT_CAP > 0:
        # SOFT_CAP * tanh(x / SOFT_CAP) * log2(e), with tanh(x) = 1 - 2 / (1 + e^2x) and x * log2(e) = scores * scale.
        scores = (SOFT_CAP * 1.4426950408889634) * (1 - 2 / (1 + gl.exp2(scores * (scale * (2 / SOFT_CAP)))))
        scale = 1.0
    if MASKED:
        tokens = (tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout)))[None, :]
        seen = tokens <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (tokens > positions[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new_m = gl.maximum(m, gl.max(scores, 1) * scale)
    shift = new_m
    if MASKED:
        shift = gl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing so far
    p = gl.exp2(scores * scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, new_m, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def advance(
    acc, p, m, total, q, buffers, barriers, tile, positions, count_tiles, scale, MASKED: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """One tile on: scores of `tile`, while the probabilities p of the tile before are multiplied with its values."""
    _, k_buffers, v_buffers, _ = buffers
    _, _, k_full, k_empty, v_full, v_empty, _ = barriers
    stage = count_tiles % STAGES
    before = (count_tiles - 1) % STAGES
    mbarrier.wait(k_full.index(stage), count_tiles // STAGES & 1)
    zeros = gl.zeros([64, TILE], gl.float32, layout)
    scores = warpgroup_mma(q, k_buffers.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (count_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(p, v_buffers.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    warps_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    p_next, m, total, alpha = softmax(scores, m, total, positions, tile, scale, MASKED, TILE, SOFT_CAP, WINDOW, layout)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    warps_barrier()
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    p = gl.convert_layout(p_next.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
    return acc, p, m, total


@gluon.jit
def consume(
    half, buffers, barriers, out_ptr, scale, HEADS: gl.constexpr, PACK: gl.constexpr, HEAD_DIM: gl.constexpr,
    DIM_PAD: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A consumer: the rows [64 * half, 64 * half + 64) of every item."""
    q_buffer, k_buffers, v_buffers, info = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    TOKENS: gl.constexpr = 64 // PACK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_PAD, 16])
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q = q_buffer.index(half)
    count_tiles = 0
    count_items = 0
    mbarrier.wait(q_full, 0)
    num_tokens = gl.sum(info.index(2).load(scalar), 0)
    while num_tokens > 0:
        group = gl.sum(info.index(0).load(scalar), 0)
        begin = gl.sum(info.index(1).load(scalar), 0)
        first_position = gl.sum(info.index(3).load(scalar), 0)
        first, end = tile_range(first_position, first_position + num_tokens - 1, TILE, WINDOW)
        # Tiles from first_masked on hold tokens that some row does not see; with a window, so do those before end_masked.
        first_masked = (first_position + half * TOKENS + 1) // TILE
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        # Rows beyond the run repeat the last token's position, so that every row sees something.
        positions = first_position + gl.minimum(half * TOKENS + rows // PACK, num_tokens - 1)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
        acc = gl.zeros([64, DIM_PAD], gl.float32, o_layout)

        tile = end - 1
        stage = count_tiles % STAGES
        mbarrier.wait(k_full.index(stage), count_tiles // STAGES & 1)
        zeros = gl.zeros([64, TILE], gl.float32, layout)
        scores = warpgroup_mma(q, k_buffers.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        warps_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, m, total, alpha = softmax(scores, m, total, positions, tile, scale, True, TILE, SOFT_CAP, WINDOW, layout)
        p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
        count_tiles += 1

        end_unmasked = gl.minimum(gl.maximum(first_masked, first), tile)
        first_unmasked = first
        if WINDOW > 0:
            first_unmasked = gl.cdiv(gl.maximum(first_position + num_tokens - WINDOW, 0), TILE)
            end_unmasked = gl.maximum(end_unmasked, gl.minimum(first_unmasked, tile))
        for i in range(tile - end_unmasked):
            acc, p, m, total = advance(
                acc, p, m, total, q, buffers, barriers, tile - 1 - i, positions, count_tiles, scale, True, TILE, STAGES, SOFT_CAP,
                WINDOW, layout, o_layout,
            )  # fmt: skip
            count_tiles += 1
        for i in range(end_unmasked - first_unmasked):
            acc, p, m, total = advance(
                acc, p, m, total, q, buffers, barriers, end_unmasked - 1 - i, positions, count_tiles, scale, False, TILE, STAGES,
                SOFT_CAP, WINDOW, layout, o_layout,
            )  # fmt: skip
            count_tiles += 1
        if WINDOW > 0:
            last = gl.minimum(end_unmasked, first_unmasked)
            for i in range(last - first):
                acc, p, m, total = advance(
                    acc, p, m, total, q, buffers, barriers, last - 1 - i, positions, count_tiles, scale, True, TILE, STAGES,
                    SOFT_CAP, WINDOW, layout, o_layout,
                )  # fmt: skip
                count_tiles += 1
        # The queries have been read, and so has the info: the next item's may come.
        mbarrier.arrive(q_empty, count=1)
        count_items += 1
        before = (count_tiles - 1) % STAGES
        mbarrier.wait(v_full.index(before), (count_tiles - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_buffers.index(before), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        warps_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)

        inverse = gl.where(total > 0, 1.0 / total, 0.0)  # a query that sees nothing gets zeros
        o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
        o_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
        dims = gl.arange(0, DIM_PAD, layout=gl.SliceLayout(0, o_layout))
        token = half * TOKENS + o_rows // PACK
        live = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
        base = out_ptr + (begin.to(gl.int64) * HEADS + group * PACK) * HEAD_DIM
        offsets = ((token * HEADS + o_rows % PACK) * HEAD_DIM)[:, None] + dims[None, :]
        gl.store(base + offsets, o.to(out_ptr.dtype.element_ty), mask=live)
        mbarrier.wait(q_full, count_items & 1)
        num_tokens = gl.sum(info.index(2).load(scalar), 0)


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
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Grid [programs]: each takes items until the queue, head groups x items_per_head, is empty.

    An item is up to 128 // PACK query tokens of one sequence under PACK query heads of one KV head; row r of its tile is the
    token r // PACK under head r % PACK.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    CHUNK: gl.constexpr = 64
    kv_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    info_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffer = gl.allocate_shared_memory(dtype, [2, 64, DIM_PAD], kv_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM_PAD], kv_layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM_PAD], kv_layout)
    info = gl.allocate_shared_memory(gl.int32, [4, 1], info_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    v_landed = gl.allocate_shared_memory(gl.int64, [1], barrier_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(v_landed, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    warps_barrier()
    buffers = (q_buffer, k_buffers, v_buffers, info)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed)
    gl.warp_specialize(
        [
            (consume, (0, buffers, barriers, out_ptr, scale, HEADS, PACK, HEAD_DIM, DIM_PAD, TILE, STAGES, SOFT_CAP, WINDOW)),
            (consume, (1, buffers, barriers, out_ptr, scale, HEADS, PACK, HEAD_DIM, DIM_PAD, TILE, STAGES, SOFT_CAP, WINDOW)),
            (produce, (buffers, barriers, (q_descriptor, k_descriptor, v_descriptor), table_ptr, starts_ptr, lens_ptr, counter_ptr,
                       num_seqs, table_stride, items_per_head, num_items, PACK, GROUP, DIM_PAD, CHUNK, BLOCK_SIZE,
                       TILE, STAGES, WINDOW)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
