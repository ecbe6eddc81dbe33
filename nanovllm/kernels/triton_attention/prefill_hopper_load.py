"""The producer of the prefill kernel for Hopper: takes work items, and copies their queries, keys and values into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nanovllm.kernels.triton_ops._gluon import reinterpret, tma_load, warps_barrier


@gluon.jit
def decode_item(item, starts_ptr, lens_ptr, num_seqs, items_per_head, TOKENS: gl.constexpr):
    """Work item -> (head group, sequence, first query of the run, queries in the run, tokens of the sequence).

    One head group after the other, so that what the items in flight read stays in L2. Sequence s owns the items from
    starts[s] // TOKENS + s on, at least as many as it needs (a first query below zero: not needed); its last queries, which
    see the most, come first.
    """
    head = item // items_per_head
    index = item % items_per_head
    seq = -1
    offs = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for base in range(0, num_seqs, 256):
        seqs = base + offs
        firsts = gl.load(starts_ptr + seqs, mask=seqs < num_seqs, other=2**30) // TOKENS + seqs
        seq += gl.sum((firsts <= index).to(gl.int32), 0)
    start = gl.load(starts_ptr + seq)
    count = gl.load(starts_ptr + seq + 1) - start
    length = gl.load(lens_ptr + seq)
    first_query = (gl.cdiv(count, TOKENS) - 1 - (index - start // TOKENS - seq)) * TOKENS
    return head, seq, start, first_query, count, length


@gluon.jit
def tile_range(first_position, last_position, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """The tiles that the queries at [first_position, last_position] see: [first, end), at least one."""
    first = 0
    if WINDOW > 0:
        first = gl.maximum(first_position - WINDOW + 1, 0) // TILE
    # At least one, also for a sequence without tokens: its queries see nothing of it.
    return first, gl.maximum(last_position, 0) // TILE + 1


@gluon.jit
def copy_tile(
    descriptor, buffer, barrier, table_ptr, tile, head, last_block, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    DIM_PAD: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of keys or values: boxes of CHUNK columns of a block of the cache, or of a part of one."""
    PART: gl.constexpr = descriptor.block_shape[0]
    CHUNK: gl.constexpr = descriptor.block_shape[2]
    LAYOUT: gl.constexpr = descriptor.layout
    # In memory a tile is one column of chunks after the other, and the rows of each are contiguous.
    boxes = reinterpret(buffer, buffer.dtype, [DIM_PAD // CHUNK * (TILE // PART), PART, CHUNK], buffer.layout)
    for part in gl.static_range(TILE // PART):
        token = tile * TILE + part * PART
        # Beyond a sequence's last block its table may hold anything: that block is read again.
        block = gl.load(table_ptr + gl.minimum(token // BLOCK_SIZE, last_block))
        slot = block * BLOCK_SIZE + token % BLOCK_SIZE
        for column in gl.static_range(DIM_PAD // CHUNK):
            box = reinterpret(boxes.index(column * (TILE // PART) + part), buffer.dtype, [PART, 1, CHUNK], LAYOUT)
            tma_load(descriptor, [slot, head, column * CHUNK], barrier, box)


@gluon.jit
def clear_dead_rows(buffer, first_dead, TILE: gl.constexpr, DIM_PAD: gl.constexpr, CHUNK: gl.constexpr):
    """Zero the rows of a tile of values from first_dead on: they may hold NaN, and 0 * NaN is NaN. For one warp."""
    LAYOUT: gl.constexpr = buffer.layout
    # In memory a tile is columns of CHUNK elements, and eight rows of one are contiguous.
    groups = reinterpret(buffer, buffer.dtype, [DIM_PAD // CHUNK * TILE // 8, 8, CHUNK], LAYOUT)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // CHUNK, CHUNK // 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    for group in range(first_dead // 8, TILE // 8):
        live = (group * 8 + rows < first_dead)[:, None]
        for column in gl.static_range(DIM_PAD // CHUNK):
            part = groups.index(column * (TILE // 8) + group)
            value = part.load(layout)
            part.store(gl.where(live, value, 0.0))
    fence_async_shared()


@gluon.jit
def produce(
    buffers, barriers, descriptors, table_ptr, starts_ptr, lens_ptr, counter_ptr, num_seqs, table_stride, items_per_head,
    num_items, PACK: gl.constexpr, GROUP: gl.constexpr, DIM_PAD: gl.constexpr,
    CHUNK: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer: takes items, and copies their queries, keys and values into shared memory."""
    q_buffer, k_buffers, v_buffers, info = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed = barriers
    q_descriptor, k_descriptor, v_descriptor = descriptors
    TOKENS: gl.constexpr = 2 * 64 // PACK
    KV_BYTES: gl.constexpr = TILE * DIM_PAD * 2
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count_items = 0
    count_tiles = 0
    partial_tiles = 0
    item = gl.program_id(0)
    while item < num_items:
        group, seq, start, first_query, count, length = decode_item(
            item, starts_ptr, lens_ptr, num_seqs, items_per_head, TOKENS
        )
        if first_query >= 0:
            num_tokens = gl.minimum(TOKENS, count - first_query)
            first_position = length - count + first_query
            head = group * PACK
            mbarrier.wait(q_empty, (count_items & 1) ^ 1)
            info.index(0).store(gl.full([1], group, gl.int32, scalar))
            info.index(1).store(gl.full([1], start + first_query, gl.int32, scalar))
            info.index(2).store(gl.full([1], num_tokens, gl.int32, scalar))
            info.index(3).store(gl.full([1], first_position, gl.int32, scalar))
            warps_barrier()
            mbarrier.expect(q_full, 2 * 64 * DIM_PAD * 2)
            for half in gl.static_range(2):
                tma_load(
                    q_descriptor, [start + first_query + half * (64 // PACK), head, 0], q_full,
                    reinterpret(q_buffer.index(half), q_descriptor.dtype, [64 // PACK, PACK, DIM_PAD], q_descriptor.layout),
                )  # fmt: skip
            count_items += 1
            first, end = tile_range(first_position, first_position + num_tokens - 1, TILE, WINDOW)
            table = table_ptr + seq.to(gl.int64) * table_stride
            last_block = (length - 1) // BLOCK_SIZE
            kv_head = head // GROUP
            for i in range(end - first):
                tile = end - 1 - i
                stage = count_tiles % STAGES
                phase = count_tiles // STAGES & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), KV_BYTES)
                copy_tile(
                    k_descriptor, k_buffers.index(stage), k_full.index(stage), table, tile, kv_head, last_block, BLOCK_SIZE, TILE,
                    DIM_PAD,
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                if (tile + 1) * TILE <= length:
                    mbarrier.expect(v_full.index(stage), KV_BYTES)
                    copy_tile(
                        v_descriptor, v_buffers.index(stage), v_full.index(stage), table, tile, kv_head, last_block,
                        BLOCK_SIZE, TILE, DIM_PAD,
                    )  # fmt: skip
                else:
                    mbarrier.expect(v_landed, KV_BYTES)
                    copy_tile(
                        v_descriptor,
                        v_buffers.index(stage),
                        v_landed,
                        table,
                        tile,
                        kv_head,
                        last_block,
                        BLOCK_SIZE,
                        TILE,
                        DIM_PAD,
                    )
                    mbarrier.wait(v_landed, partial_tiles & 1)
                    partial_tiles += 1
                    clear_dead_rows(v_buffers.index(stage), length - tile * TILE, TILE, DIM_PAD, CHUNK)
                    warps_barrier()
                    mbarrier.arrive(v_full.index(stage), count=1)
                count_tiles += 1
        item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    mbarrier.wait(q_empty, (count_items & 1) ^ 1)
    info.index(2).store(gl.full([1], 0, gl.int32, scalar))
    warps_barrier()
    mbarrier.arrive(q_full, count=1)
    # The last program leaves the counters zero for the next launch.
    if gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
