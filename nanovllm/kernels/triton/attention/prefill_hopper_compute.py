"""The consumers of the prefill kernel for Hopper: scores, softmax, and the products with the values.

Where shared memory has room for the queries of two items, all tiles of all items are one pipeline: the scores of a tile
are computed beside the product of the probabilities and values of the tile before, be that of the same item or not.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from nanovllm.kernels.triton.attention.prefill_hopper_load import tile_range
from nanovllm.kernels.triton.gluon_compat import warps_barrier


@gluon.jit
def softmax(
    scores, m, total, positions, tile, scale, MASKED: gl.constexpr, TILE: gl.constexpr, SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Scores of a tile -> (probabilities, m, total, what to multiply the output so far by); m is in scaled units,
    base 2.
    """
    if SOFT_CAP > 0:
        # SOFT_CAP * tanh(x / SOFT_CAP) * log2(e), with tanh(x) = 1 - 2 / (1 + e^2x) and x * log2(e) = scores * scale.
        scores = (SOFT_CAP * 1.4426950408889634) * (1 - 2 / (1 + gl.exp2(scores * (scale * (2 / SOFT_CAP)))))
        scale = 1.0
    if MASKED:
        columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        # Bits 1 and 2 of a column are the thread's, all others the register's: what a thread compares with are
        # constants. With two values only known at run time ptxas compared before it issued the second product, and kept
        # 128 results packed into bits.
        last = (positions - tile * TILE)[:, None] - (columns & 6)[None, :]
        constants = (columns & ~6)[None, :]
        seen = constants <= last
        if WINDOW > 0:
            seen = seen & (constants > last - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new_m = gl.maximum(m, gl.max(scores, 1) * scale)
    shift = new_m
    if MASKED:
        shift = gl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing so far
    p = gl.exp2(scores * scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, new_m, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def queries_of(q_buffers, index, QUERIES: gl.constexpr):
    """The buffer of queries to multiply now.

    Of two buffers the index goes through a shuffle in every tile. Without it ptxas (of CUDA 12.8, as Triton 3.6 brings
    it) computed descriptors before a loop that may be skipped, and used them after it; with it they are computed in
    every tile.
    """
    if QUERIES > 1:
        index = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1
        )
    return q_buffers.index(index)


@gluon.jit
def step(
    acc, p, m, total, q_index, buffers, barriers, tile, positions, count_tiles, scale, MASKED: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of `tile`, while the probabilities p of the tile before are multiplied with its values.

    Returns the output with the tile before, then as `softmax` does. The tile before may be of the item before: m and
    total are then those of no tile.
    """
    q_buffers, k_buffers, v_buffers, _ = buffers
    _, _, k_full, k_empty, v_full, v_empty, _ = barriers
    stage = count_tiles % STAGES
    before = (count_tiles - 1) % STAGES
    q = queries_of(q_buffers, q_index, QUERIES)
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
    return acc, p_next, m, total, alpha


@gluon.jit
def advance(
    acc, p, m, total, q_index, buffers, barriers, tile, positions, count_tiles, scale, MASKED: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """One tile on, of the same item."""
    acc, p_next, m, total, alpha = step(
        acc, p, m, total, q_index, buffers, barriers, tile, positions, count_tiles, scale, MASKED, TILE, STAGES,
        QUERIES, SOFT_CAP,
        WINDOW, layout,
    )  # fmt: skip
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    return acc, gl.convert_layout(p_next.to(p.dtype), gl.DotOperandLayout(0, o_layout, 2)), m, total


@gluon.jit
def first_probabilities(
    q, buffers, barriers, tile, positions, count_tiles, scale, TILE: gl.constexpr, STAGES: gl.constexpr,
    SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Those of an item's first tile, with nothing before it to multiply meanwhile -> (p, m, total)."""
    _, k_buffers, _, _ = buffers
    _, _, k_full, k_empty, _, _, _ = barriers
    stage = count_tiles % STAGES
    mbarrier.wait(k_full.index(stage), count_tiles // STAGES & 1)
    zeros = gl.zeros([64, TILE], gl.float32, layout)
    scores = warpgroup_mma(q, k_buffers.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    warps_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    p, m, total, _ = softmax(scores, m, total, positions, tile, scale, True, TILE, SOFT_CAP, WINDOW, layout)
    return gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2)), m, total


@gluon.jit
def last_product(acc, p, buffers, barriers, count_tiles, STAGES: gl.constexpr):
    """The output with the last tile, with no scores to compute meanwhile."""
    _, _, v_buffers, _ = buffers
    _, _, _, _, v_full, v_empty, _ = barriers
    before = (count_tiles - 1) % STAGES
    mbarrier.wait(v_full.index(before), (count_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(p, v_buffers.index(before), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    warps_barrier()
    mbarrier.arrive(v_empty.index(before), count=1)
    return acc


@gluon.jit
def read_item(info, slot):
    """(head group, first row of the queries, queries, position of the first); no queries: there is no item."""
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    group = gl.sum(info.index(4 * slot).load(scalar), 0)
    begin = gl.sum(info.index(4 * slot + 1).load(scalar), 0)
    num_tokens = gl.sum(info.index(4 * slot + 2).load(scalar), 0)
    first_position = gl.sum(info.index(4 * slot + 3).load(scalar), 0)
    return group, begin, num_tokens, first_position


@gluon.jit
def row_positions(half, num_tokens, first_position, PACK: gl.constexpr, layout: gl.constexpr):
    """Rows beyond the run repeat the last token's position, so that every row sees something."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    return first_position + gl.minimum(half * (64 // PACK) + rows // PACK, num_tokens - 1)


@gluon.constexpr_function
def row_layout(size):
    """The layout of the output's [64, size]: a thread holds pieces of eight columns, and a warp the rows that it has
    in a product's result.
    """
    columns = [[0, 32 << i] for i in range((size // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *columns], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, size],
    )  # fmt: skip


@gluon.jit
def store_output(
    out_ptr, acc, total, half, group, begin, num_tokens, HEADS: gl.constexpr, PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
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
def consume(
    half: gl.constexpr, buffers, barriers, out_ptr, scale, HEADS: gl.constexpr, PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DIM_PAD: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, QUERIES: gl.constexpr, SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """A consumer: the rows [64 * half, 64 * half + 64) of every item.

    With two buffers of queries the scores of an item's first tile are computed beside the product of the probabilities
    and values of the last tile of the item before; with one, whose next content waits for the last scores, they come
    after it.
    """
    q_buffers, k_buffers, v_buffers, info = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed = barriers
    TOKENS: gl.constexpr = 64 // PACK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_PAD, 16])
    count_tiles = 0  # whose scores have been computed
    count_items = 0
    mbarrier.wait(q_full.index(0), 0)
    group, begin, num_tokens, first_position = read_item(info, 0)
    acc = gl.zeros([64, DIM_PAD], gl.float32, o_layout)
    p = gl.zeros([64, TILE], q_buffers.dtype, gl.DotOperandLayout(0, o_layout, 2))
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    if QUERIES > 1:
        if num_tokens > 0:
            positions = row_positions(half, num_tokens, first_position, PACK, layout)
            first, end = tile_range(first_position, first_position + num_tokens - 1, TILE, WINDOW)
            p, m, total = first_probabilities(
                q_buffers.index(half), buffers, barriers, end - 1, positions, 0, scale, TILE, STAGES, SOFT_CAP, WINDOW,
                layout,
                o_layout,
            )  # fmt: skip
    while num_tokens > 0:
        slot = count_items % QUERIES
        q_index = 2 * slot + half
        positions = row_positions(half, num_tokens, first_position, PACK, layout)
        first, end = tile_range(first_position, first_position + num_tokens - 1, TILE, WINDOW)
        tile = end - 1
        if QUERIES == 1:
            p, m, total = first_probabilities(
                q_buffers.index(half), buffers, barriers, tile, positions, count_tiles, scale, TILE, STAGES, SOFT_CAP,
                WINDOW, layout, o_layout,
            )  # fmt: skip
        count_tiles += 1

        # Tiles from first_masked on hold tokens that some row does not see; with a window, so do those before
        # first_unmasked.
        first_masked = (first_position + half * TOKENS + 1) // TILE
        end_unmasked = gl.minimum(gl.maximum(first_masked, first), tile)
        first_unmasked = first
        if WINDOW > 0:
            first_unmasked = gl.cdiv(gl.maximum(first_position + num_tokens - WINDOW, 0), TILE)
            end_unmasked = gl.maximum(end_unmasked, gl.minimum(first_unmasked, tile))
        for i in range(tile - end_unmasked):
            acc, p, m, total = advance(
                acc, p, m, total, q_index, buffers, barriers, tile - 1 - i, positions, count_tiles, scale, True, TILE,
                STAGES,
                QUERIES, SOFT_CAP, WINDOW, layout, o_layout,
            )  # fmt: skip
            count_tiles += 1
        for i in range(end_unmasked - first_unmasked):
            acc, p, m, total = advance(
                acc, p, m, total, q_index, buffers, barriers, end_unmasked - 1 - i, positions, count_tiles, scale,
                False, TILE, STAGES,
                QUERIES, SOFT_CAP, WINDOW, layout, o_layout,
            )  # fmt: skip
            count_tiles += 1
        if WINDOW > 0:
            last = gl.minimum(end_unmasked, first_unmasked)
            for i in range(last - first):
                acc, p, m, total = advance(
                    acc, p, m, total, q_index, buffers, barriers, last - 1 - i, positions, count_tiles, scale, True,
                    TILE, STAGES,
                    QUERIES, SOFT_CAP, WINDOW, layout, o_layout,
                )  # fmt: skip
                count_tiles += 1
        # The queries have been read, and so has the info: others may come.
        mbarrier.arrive(q_empty.index(slot), count=1)
        count_items += 1
        slot = count_items % QUERIES
        parity = count_items // QUERIES & 1
        if QUERIES > 1:
            mbarrier.wait(q_full.index(slot), parity)
            next_group, next_begin, next_tokens, next_position = read_item(info, slot)
            next_total = total
            if next_tokens > 0:
                positions = row_positions(half, next_tokens, next_position, PACK, layout)
                first, end = tile_range(next_position, next_position + next_tokens - 1, TILE, WINDOW)
                m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
                acc, p_next, m, next_total, alpha = step(
                    acc, p, m, gl.zeros([64], gl.float32, gl.SliceLayout(1, layout)), 2 * slot + half, buffers,
                    barriers, end - 1, positions, count_tiles, scale, True, TILE, STAGES, QUERIES, SOFT_CAP, WINDOW,
                    layout,
                )  # fmt: skip
                p = gl.convert_layout(p_next.to(p.dtype), gl.DotOperandLayout(0, o_layout, 2))
            else:
                acc = last_product(acc, p, buffers, barriers, count_tiles, STAGES)
            store_output(
                out_ptr, acc, total, half, group, begin, num_tokens, HEADS, PACK, HEAD_DIM, DIM_PAD, WIDE, o_layout
            )
            total = next_total
        else:
            acc = last_product(acc, p, buffers, barriers, count_tiles, STAGES)
            store_output(
                out_ptr, acc, total, half, group, begin, num_tokens, HEADS, PACK, HEAD_DIM, DIM_PAD, WIDE, o_layout
            )
            mbarrier.wait(q_full.index(slot), parity)
            next_group, next_begin, next_tokens, next_position = read_item(info, slot)
        group, begin, num_tokens, first_position = next_group, next_begin, next_tokens, next_position
        acc = gl.zeros([64, DIM_PAD], gl.float32, o_layout)
