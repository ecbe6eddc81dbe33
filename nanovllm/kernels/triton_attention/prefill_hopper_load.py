"""The producer of the prefill kernel for Hopper: copies work items' queries, keys and values into shared memory.

Tiles are one sequence, whatever item they are of. For each the keys come first, then the values of the tile before, which the
consumers multiply after them; the first keys of an item, and its queries, are asked for before the last values of the item before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nanovllm.kernels.triton_attention.prefill_hopper_items import DESCRIPTIONS, read_word
from nanovllm.kernels.triton_ops._gluon import reinterpret, tma_load, warps_barrier


@gluon.jit
def read_item(items, described, count_items):
    """Wait for the scheduler's description of an item -> what it says, see `find_item`."""
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(described.index(count_items % DESCRIPTIONS), count_items // DESCRIPTIONS & 1)
    group = read_word(items, count_items, 0, scalar)
    seq = read_word(items, count_items, 1, scalar)
    length = read_word(items, count_items, 2, scalar)
    begin = read_word(items, count_items, 3, scalar)
    num_tokens = read_word(items, count_items, 4, scalar)
    first = read_word(items, count_items, 6, scalar)
    last = read_word(items, count_items, 7, scalar)
    return group, seq, length, begin, num_tokens, first, last


@gluon.jit
def copy_queries(
    q_buffers, full, empty, descriptor, count_items, group, begin, num_tokens, PACK: gl.constexpr, QUERIES: gl.constexpr,
    DIM_PAD: gl.constexpr,
):  # fmt: skip
    """Start the copy of an item's queries; for no tokens, which ends the consumers, only say that it is their turn."""
    slot = count_items % QUERIES
    mbarrier.wait(empty.index(slot), (count_items // QUERIES & 1) ^ 1)
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
    descriptor, buffer, empty, parity, full, table_ptr, tile, head, last_block, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
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
    buffers, barriers, described, wanted, descriptors, table_ptr, table_stride, PACK: gl.constexpr, GROUP: gl.constexpr,
    DIM_PAD: gl.constexpr, CHUNK: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    QUERIES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The producer: copies the queries, keys and values of items that the scheduler finds.

    It wants the next item when it has asked for all but AHEAD tiles of keys of one, so that programs that finish early may have what
    is left. The consumers are then done with the item before the one before.
    """
    q_buffers, k_buffers, v_buffers, items = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed = barriers
    q_descriptor, k_descriptor, v_descriptor = descriptors
    count_items = 0
    count_tiles = 0
    partial_tiles = 0
    group, seq, length, begin, num_tokens, first, tile = read_item(items, described, 0)
    announced = gl.minimum(first + AHEAD, tile)
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
                k_descriptor, k_buffers.index(stage), k_empty.index(stage), (count_tiles // STAGES & 1) ^ 1, k_full.index(stage),
                table_ptr + seq.to(gl.int64) * table_stride, tile, head, (length - 1) // BLOCK_SIZE, BLOCK_SIZE, TILE, DIM_PAD,
            )  # fmt: skip
        if QUERIES > 1:
            if is_new:
                copy_queries(
                    q_buffers,
                    q_full,
                    q_empty,
                    q_descriptor,
                    count_items,
                    group,
                    begin,
                    num_tokens,
                    PACK,
                    QUERIES,
                    DIM_PAD,
                )
        if v_tile >= 0:
            stage = (count_tiles - 1) % STAGES
            parity = ((count_tiles - 1) // STAGES & 1) ^ 1
            v_table = table_ptr + v_seq.to(gl.int64) * table_stride
            last_block = (v_length - 1) // BLOCK_SIZE
            if (v_tile + 1) * TILE <= v_length:
                copy_tile(
                    v_descriptor, v_buffers.index(stage), v_empty.index(stage), parity, v_full.index(stage), v_table, v_tile,
                    v_head, last_block, BLOCK_SIZE, TILE, DIM_PAD,
                )  # fmt: skip
            else:
                copy_tile(
                    v_descriptor, v_buffers.index(stage), v_empty.index(stage), parity, v_landed, v_table, v_tile, v_head,
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
                    q_buffers,
                    q_full,
                    q_empty,
                    q_descriptor,
                    count_items,
                    group,
                    begin,
                    num_tokens,
                    PACK,
                    QUERIES,
                    DIM_PAD,
                )
        count_items += is_new.to(gl.int32)
        is_new = num_tokens < 0
        if (tile >= 0) & (tile == announced):
            mbarrier.arrive(wanted, count=1)
        v_tile = tile
        v_seq = seq
        v_head = head
        v_length = length
        if tile >= 0:
            count_tiles += 1
            tile -= 1
            if tile < first:
                group, seq, length, begin, num_tokens, first, tile = read_item(items, described, count_items)
                announced = gl.minimum(first + AHEAD, tile)
                is_new = num_tokens > 0
    copy_queries(q_buffers, q_full, q_empty, q_descriptor, count_items, 0, 0, 0, PACK, QUERIES, DIM_PAD)
