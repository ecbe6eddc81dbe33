"""The producer of the prefill kernel for Hopper: takes work items, and copies their queries, keys and values into
shared memory.

Tiles are one sequence, whatever item they are of. For each the keys come first, then the values of the tile before,
which the consumers multiply after them; the first keys of an item, and its queries, are asked for before the last
values of the item before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nanovllm.kernels.triton.gluon_compat import reinterpret, tma_load, warps_barrier


@gluon.jit
def decode_item(item, starts_ptr, lens_ptr, num_seqs, items_per_head, TOKENS: gl.constexpr):
    """Work item -> (head group, sequence, first query of the run, queries in the run, tokens of the sequence).

    One head group after the other, so that what the items in flight read stays in L2. Sequence s owns the items from
    starts[s] // TOKENS + s on, at least as many as it needs (a first query below zero: not needed); its last queries,
    which see the most, come first.
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
def find_item(
    item, counter_ptr, starts_ptr, lens_ptr, num_seqs, items_per_head, num_items, TOKENS: gl.constexpr,
    TILE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The first item that is needed, of this one and those of the counter -> (head group, sequence, its tokens, first
    row of the queries, queries, position of the first, first tile, last tile); no queries, and -1 as the last tile:
    there is none."""
    group = 0
    seq = 0
    length = 0
    begin = 0
    num_tokens = 0
    first_position = 0
    first = 0
    last = -1
    while (num_tokens == 0) & (item < num_items):
        group, seq, start, first_query, count, length = decode_item(
            item, starts_ptr, lens_ptr, num_seqs, items_per_head, TOKENS
        )
        if first_query >= 0:
            begin = start + first_query
            num_tokens = gl.minimum(TOKENS, count - first_query)
            first_position = length - count + first_query
            first, end = tile_range(first_position, first_position + num_tokens - 1, TILE, WINDOW)
            last = end - 1
        else:
            item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return group, seq, length, begin, num_tokens, first_position, first, last


@gluon.jit
def copy_queries(
    q_buffers, info, full, empty, descriptor, count_items, group, begin, num_tokens, first_position, PACK: gl.constexpr,
    QUERIES: gl.constexpr, DIM_PAD: gl.constexpr,
):  # fmt: skip
    """Say what the next item is, and start the copy of its queries; for no tokens, which ends the consumers, there
    is none.
    """
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = count_items % QUERIES
    mbarrier.wait(empty.index(slot), (count_items // QUERIES & 1) ^ 1)
    info.index(4 * slot).store(gl.full([1], group, gl.int32, scalar))
    info.index(4 * slot + 1).store(gl.full([1], begin, gl.int32, scalar))
    info.index(4 * slot + 2).store(gl.full([1], num_tokens, gl.int32, scalar))
    info.index(4 * slot + 3).store(gl.full([1], first_position, gl.int32, scalar))
    warps_barrier()
    if num_tokens > 0:
        mbarrier.expect(full.index(slot), 2 * 64 * DIM_PAD * 2)
        for half in gl.static_range(2):
            buffer = reinterpret(
                q_buffers.index(2 * slot + half), descriptor.dtype, [64 // PACK, PACK, DIM_PAD], descriptor.layout
            )
            tma_load(descriptor, [begin + half * (64 // PACK), group * PACK, 0], full.index(slot), buffer)
    else:
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def copy_tile(
    descriptor, buffer, empty, parity, full, table_ptr, tile, head, last_block, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    DIM_PAD: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of keys or values: boxes of CHUNK columns of a block of the cache, or of a part of
    one.
    """
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
        if part == 0:
            mbarrier.wait(empty, parity)
            mbarrier.expect(full, TILE * DIM_PAD * 2)
        for column in gl.static_range(DIM_PAD // CHUNK):
            box = reinterpret(boxes.index(column * (TILE // PART) + part), buffer.dtype, [PART, 1, CHUNK], LAYOUT)
            tma_load(descriptor, [slot, head, column * CHUNK], full, box)


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
    buffers, barriers, descriptors, table_ptr, starts_ptr, lens_ptr, counter_ptr, num_seqs, table_stride,
    items_per_head,
    num_items, PACK: gl.constexpr, GROUP: gl.constexpr, DIM_PAD: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer: takes items, and copies their queries, keys and values into shared memory."""
    q_buffers, k_buffers, v_buffers, info = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed = barriers
    q_descriptor, k_descriptor, v_descriptor = descriptors
    TOKENS: gl.constexpr = 2 * 64 // PACK
    count_items = 0
    count_tiles = 0
    partial_tiles = 0
    group, seq, length, begin, num_tokens, first_position, first, tile = find_item(
        gl.program_id(0), counter_ptr, starts_ptr, lens_ptr, num_seqs, items_per_head, num_items, TOKENS, TILE, WINDOW
    )
    is_new = num_tokens > 0
    # The tile before, whose values are still to be asked for; below zero: none.
    v_tile = -1
    v_seq = 0
    v_head = 0
    v_length = 0
    while (tile >= 0) | (v_tile >= 0):
        head = group * PACK // GROUP
        if tile >= 0:
            stage = count_tiles % STAGES
            copy_tile(
                k_descriptor, k_buffers.index(stage), k_empty.index(stage), (count_tiles // STAGES & 1) ^ 1,
                k_full.index(stage),
                table_ptr + seq.to(gl.int64) * table_stride, tile, head, (length - 1) // BLOCK_SIZE, BLOCK_SIZE, TILE,
                DIM_PAD,
            )  # fmt: skip
        if QUERIES > 1:
            if is_new:
                copy_queries(
                    q_buffers, info, q_full, q_empty, q_descriptor, count_items, group, begin, num_tokens,
                    first_position, PACK,
                    QUERIES, DIM_PAD,
                )  # fmt: skip
        if v_tile >= 0:
            stage = (count_tiles - 1) % STAGES
            parity = ((count_tiles - 1) // STAGES & 1) ^ 1
            v_table = table_ptr + v_seq.to(gl.int64) * table_stride
            last_block = (v_length - 1) // BLOCK_SIZE
            if (v_tile + 1) * TILE <= v_length:
                copy_tile(
                    v_descriptor, v_buffers.index(stage), v_empty.index(stage), parity, v_full.index(stage), v_table,
                    v_tile,
                    v_head, last_block, BLOCK_SIZE, TILE, DIM_PAD,
                )  # fmt: skip
            else:
                copy_tile(
                    v_descriptor, v_buffers.index(stage), v_empty.index(stage), parity, v_landed, v_table, v_tile,
                    v_head,
                    last_block, BLOCK_SIZE, TILE, DIM_PAD,
                )  # fmt: skip
                mbarrier.wait(v_landed, partial_tiles & 1)
                partial_tiles += 1
                clear_dead_rows(v_buffers.index(stage), v_length - v_tile * TILE, TILE, DIM_PAD, CHUNK)
                warps_barrier()
                mbarrier.arrive(v_full.index(stage), count=1)
        if QUERIES == 1:
            # These wait for the consumers' last product with the item before, which may need the values above.
            if is_new:
                copy_queries(
                    q_buffers, info, q_full, q_empty, q_descriptor, count_items, group, begin, num_tokens,
                    first_position, PACK,
                    QUERIES, DIM_PAD,
                )  # fmt: skip
        count_items += is_new.to(gl.int32)
        is_new = num_tokens < 0
        v_tile = tile
        v_seq = seq
        v_head = head
        v_length = length
        if tile >= 0:
            count_tiles += 1
            tile -= 1
            if tile < first:
                item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
                group, seq, length, begin, num_tokens, first_position, first, tile = find_item(
                    item, counter_ptr, starts_ptr, lens_ptr, num_seqs, items_per_head, num_items, TOKENS, TILE, WINDOW
                )
                is_new = num_tokens > 0
    copy_queries(
        q_buffers, info, q_full, q_empty, q_descriptor, count_items, 0, 0, 0, 0, PACK, QUERIES, DIM_PAD,
    )  # fmt: skip
    # The last program leaves the counters zero for the next launch.
    if gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
