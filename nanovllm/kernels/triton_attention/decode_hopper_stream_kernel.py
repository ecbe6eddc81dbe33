"""Decode attention for Hopper in equal parts (stream-K): a program goes from one sequence to the next, and its copies go on meanwhile.

`decode_hopper_kernel` gives a program one piece of a sequence. With many sequences its programs come in rounds: each finds its piece and
waits for its first tiles, and the last round ends raggedly. This kernel is meant for plans whose programs are all resident at once. The
tiles of all sequences, in a row, are cut into as many equal parts as there are programs of a head. A program asks for the next sequence's
tiles while it attends to the last ones of the sequence before, and for its queries and its new token before it merges and writes the
result of that one. A sequence that lies in several parts is merged by the program that comes last. All else is as in
`decode_hopper_kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from nanovllm.kernels.triton_attention.decode_hopper_fp8 import dims_in_order, scale_of_head
from nanovllm.kernels.triton_attention.decode_hopper_merge import (
    arrived_last,
    merge_partials,
    merge_warps,
    store_partial,
    store_rows,
)
from nanovllm.kernels.triton_attention.decode_hopper_operands import key_operands, query_operands
from nanovllm.kernels.triton_attention.decode_hopper_pieces import find_part, tiles_of
from nanovllm.kernels.triton_attention.decode_hopper_tiles import attend_tile, request_tile, tile_view
from nanovllm.kernels.triton_attention.decode_hopper_token import (
    acquire,
    attend_token,
    load_halves,
    load_pair,
    load_values,
    release,
    rotated,
    score_token,
    store_token,
    whole_layout,
)
from nanovllm.kernels.triton_ops._gluon import reinterpret, warps_barrier


@gluon.jit
def _block_of(table_ptr, table_stride, seq, token, live, BLOCK_SIZE: gl.constexpr):
    at = table_ptr + seq.to(gl.int64) * table_stride + token // BLOCK_SIZE
    return gl.load(at, mask=live, other=0, cache_modifier=".cg")


@gluon.jit
def _after(asked, lens_ptr, table_ptr, table_stride, live, NEW: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr):
    """(sequence, its length, tile, its block) -> the same of the next tile in the row, if it is `live`.

    What is loaded is wanted a tile later: a request would otherwise wait for it.
    """
    seq, length, tile, _ = asked
    tile += 1
    if tile == tiles_of(length, NEW, TILE):
        seq += 1
        tile = 0
        length = gl.load(lens_ptr + seq, mask=live, other=0, cache_modifier=".cg")
    return seq, length, tile, _block_of(table_ptr, table_stride, seq, tile * TILE, live, BLOCK_SIZE)


@gluon.jit
def _load_sequence(
    seq, length, head, q_ptr, new_k_ptr, new_v_ptr, cos_sin_ptr, table_ptr, q_stride_seq, q_stride_head, new_k_stride_seq,
    new_k_stride_head, new_v_stride_seq, new_v_stride_head, cos_sin_stride, table_stride, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, NEW: gl.constexpr,
):  # fmt: skip
    """-> (both halves of the queries, and if NEW of the new key, the new value, both halves of the angles, the new token's block)"""
    row = seq.to(gl.int64)
    q_low, q_high = load_halves(
        q_ptr + row * q_stride_seq + head * GROUP * q_stride_head, q_stride_head, GROUP, HEAD_DIM, WARPS
    )
    if NEW:
        k_low, k_high = load_halves(
            new_k_ptr + row * new_k_stride_seq + head * new_k_stride_head, 0, 8, HEAD_DIM, WARPS
        )
        v = load_values(new_v_ptr + row * new_v_stride_seq + head * new_v_stride_head, HEAD_DIM, WARPS)
        token = gl.maximum(length - 1, 0)
        cos, sin = load_pair(cos_sin_ptr + token.to(gl.int64) * cos_sin_stride, HEAD_DIM, WARPS)
        block = _block_of(table_ptr, table_stride, seq, token, length > 0, BLOCK_SIZE)
        return q_low, q_high, k_low, k_high, v, cos, sin, block
    else:
        return q_low, q_high


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@gluon.jit(
    do_not_specialize=["num_seqs", "table_stride", "most_parts", "least"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def decode_hopper_stream_kernel(
    out_ptr,  # [num_seqs, num_kv_heads, GROUP, HEAD_DIM]
    q_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM], any strides between tokens and heads; so are the next two
    new_k_ptr,  # [num_seqs, num_kv_heads, HEAD_DIM], if NEW
    new_v_ptr,
    k_whole_descriptor,  # tiles, [TILE / BOX, columns, BOX, 1, LINE] of [slots / BOX, columns, BOX, KV heads, LINE], 16 bits
    v_whole_descriptor,
    k_part_descriptor,  # boxes of a tile, [1, columns, BOX, 1, LINE] of the same
    v_part_descriptor,
    k_ptr,  # what the descriptors describe, for the new token
    v_ptr,
    table_ptr,
    lens_ptr,
    k_scale_ptr,  # [1] or [num_kv_heads] float32; anything where there is none
    v_scale_ptr,
    acc_ptr,  # [parts + num_seqs - 1, num_kv_heads, GROUP, HEAD_DIM] float32
    ml_ptr,  # [parts + num_seqs - 1, num_kv_heads, 2, GROUP] float32
    counters_ptr,  # [num_seqs, num_kv_heads] int32, zero before and after
    cos_sin_ptr,  # [max_position, HEAD_DIM] float32, if NEW
    q_weight_ptr,  # [HEAD_DIM], if NORM
    k_weight_ptr,
    num_seqs,
    q_stride_seq,
    q_stride_head,
    new_k_stride_seq,
    new_k_stride_head,
    new_v_stride_seq,
    new_v_stride_head,
    cos_sin_stride,
    eps,
    stride_slot,
    stride_head,
    table_stride,
    scale,  # times log2(e)
    most_parts,
    least,  # units that a part has at least, but for the last one
    SEQS_PAD: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    BOX: gl.constexpr,  # keys a request
    SLOTS: gl.constexpr,  # tiles in shared memory at a time
    CHUNK: gl.constexpr,  # partial results that are merged at a time
    NEW: gl.constexpr,  # whether the last token comes with the call, and not in the cache; queries are then to be rotated
    NORM: gl.constexpr,  # and normalised
    FP8: gl.constexpr,  # the caches are float8_e4m3fn, and the descriptors of words of two elements
    K_SCALES: gl.constexpr,  # with FP8; 0: no scale, 1: one, 2: one a head
    V_SCALES: gl.constexpr,
    RELEASE: gl.constexpr,  # the kernel after this one may start before this one ends
):
    """Grid [num_kv_heads, parts], of which there are most_parts at most. Programmatic dependent launch, WARPS warps."""
    dtype: gl.constexpr = k_whole_descriptor.dtype
    TILE: gl.constexpr = 16 * WARPS
    WORDS: gl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    LINE: gl.constexpr = min(WORDS, 64)
    LINES: gl.constexpr = TILE * WORDS // LINE
    VIEW: gl.constexpr = tile_view(WARPS, WORDS, BOX)
    lines_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * LINE, element_bitwidth=16, rank=2)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    k_operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rows_layout: gl.constexpr = whole_layout(HEAD_DIM, WARPS)
    descriptors = (k_whole_descriptor, v_whole_descriptor, k_part_descriptor, v_part_descriptor)
    k_tiles = gl.allocate_shared_memory(dtype, [SLOTS, LINES, LINE], lines_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [SLOTS, LINES, LINE], lines_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())

    if not NEW:
        gdc_wait()
    head = gl.program_id(0)
    num_heads = gl.num_programs(0)
    part = gl.program_id(1)
    seq, length, begin, tiles_left, first_unit, share = find_part(part, lens_ptr, num_seqs, most_parts, least, NEW, SEQS_PAD, TILE)
    if tiles_left > 0:
        acquire()
        for i in gl.static_range(SLOTS):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        warps_barrier()
        # What is asked for: a sequence, its length, a tile, and its block. All of them before the first request, which waits for its own.
        asked = ((seq, length, begin, _block_of(table_ptr, table_stride, seq, begin * TILE, True, BLOCK_SIZE)),)
        for i in gl.static_range(SLOTS):
            asked = asked + (_after(asked[i], lens_ptr, table_ptr, table_stride, i + 1 < tiles_left, NEW, BLOCK_SIZE, TILE),)
        for i in gl.static_range(SLOTS):
            if i < tiles_left:
                request_tile(
                    descriptors, k_tiles.index(i), v_tiles.index(i), full.index(i), asked[i][3], asked[i][2], head,
                    gl.maximum(asked[i][1] - NEW, 0), BLOCK_SIZE, TILE, BOX, EMPTY=True,
                )  # fmt: skip
        coming = asked[SLOTS]
        k_scale = scale_of_head(k_scale_ptr, head, K_SCALES)
        v_scale = scale_of_head(v_scale_ptr, head, V_SCALES)
        scale *= k_scale
        if NORM:
            q_low_weight, q_high_weight = load_pair(q_weight_ptr, HEAD_DIM, WARPS)
            k_low_weight, k_high_weight = load_pair(k_weight_ptr, HEAD_DIM, WARPS)
        if NEW:
            gdc_wait()  # what was read so far is not the projection's
        loaded = _load_sequence(
            seq, length, head, q_ptr, new_k_ptr, new_v_ptr, cos_sin_ptr, table_ptr, q_stride_seq, q_stride_head,
            new_k_stride_seq, new_k_stride_head, new_v_stride_seq, new_v_stride_head, cos_sin_stride, table_stride, GROUP,
            HEAD_DIM, BLOCK_SIZE, WARPS, NEW,
        )  # fmt: skip
        place = 0
        phase = 0
        while tiles_left > 0:
            end_token = gl.maximum(length - NEW, 0)  # of the cached tokens; also where a new one goes
            tiles = tiles_of(length, NEW, TILE)
            end = gl.minimum(begin + tiles_left, tiles)
            mine = (end == tiles) & (length > 0)
            last = begin + tiles_left <= tiles  # of this part's sequences
            following = gl.load(lens_ptr + seq + 1, mask=~last, other=0, cache_modifier=".cg")
            q_low = loaded[0]
            q_high = loaded[1]
            if NEW:
                _, _, k_low, k_high, new_v, cos, sin, new_block = loaded
                if not NORM:
                    q_low_weight, q_high_weight, k_low_weight, k_high_weight = cos, sin, cos, sin
                q_low, q_high = rotated(q_low, q_high, q_low_weight, q_high_weight, cos, sin, eps, HEAD_DIM, NORM)
            low, high, tile_scale = query_operands(q_low, q_high, scale, mma, WARPS, FP8)
            if NEW:
                # Every program has the new token, in each of its rows, and one makes use of it.
                k_low, k_high = rotated(k_low, k_high, k_low_weight, k_high_weight, cos, sin, eps, HEAD_DIM, NORM)
                slot = new_block.to(gl.int64) * BLOCK_SIZE + end_token % BLOCK_SIZE
                target = slot * stride_slot + head * stride_head
                k_low, k_high, new_v = store_token(
                    k_ptr + target, v_ptr + target, k_low, k_high, new_v, k_scale, v_scale, mine, HEAD_DIM, WARPS, FP8,
                    K_SCALES, V_SCALES,
                )  # fmt: skip
                score = score_token(q_low, q_high, k_low, k_high, scale, mine, HEAD_DIM, WARPS)

            acc = gl.zeros([WARPS, HEAD_DIM, 8], gl.float32, mma)
            m = gl.full([WARPS, 8], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
            total = gl.zeros([WARPS, 16, 8], gl.float32, mma)
            for tile in range(begin, end):
                mbarrier.wait(full.index(place), phase)
                k = reinterpret(k_tiles.index(place), dtype, [WARPS, 16, WORDS], VIEW).load(k_operand)
                v = (
                    reinterpret(v_tiles.index(place), dtype, [WARPS, 16, WORDS], VIEW)
                    .permute([0, 2, 1])
                    .load(k_operand)
                )
                tiles_left -= 1
                if tiles_left >= SLOTS:
                    warps_barrier()  # every warp has its part of the tile
                    request_tile(
                        descriptors, k_tiles.index(place), v_tiles.index(place), full.index(place), coming[3], coming[2], head,
                        gl.maximum(coming[1] - NEW, 0), BLOCK_SIZE, TILE, BOX, EMPTY=True,
                    )  # fmt: skip
                    coming = _after(coming, lens_ptr, table_ptr, table_stride, tiles_left > SLOTS, NEW, BLOCK_SIZE, TILE)
                tile_low, tile_high = key_operands(k, mma, FP8)
                acc, m, total = attend_tile(
                    low, high, tile_low, tile_high, v, tile * TILE, end_token, tile_scale, acc, m, total, mma, WARPS, FP8
                )  # fmt: skip
                place += 1
                if place == SLOTS:
                    place = 0
                    phase ^= 1
                if RELEASE and last & (tile == begin):
                    # All new tokens are stored, and have arrived by now, so that nobody waits for them.
                    release(True, NEW)
            # The next sequence's, if there is one: they come while this one's result is merged and written.
            loaded = _load_sequence(
                gl.minimum(seq + 1, num_seqs - 1), following, head, q_ptr, new_k_ptr, new_v_ptr, cos_sin_ptr, table_ptr,
                q_stride_seq, q_stride_head, new_k_stride_seq, new_k_stride_head, new_v_stride_seq, new_v_stride_head,
                cos_sin_stride, table_stride, GROUP, HEAD_DIM, BLOCK_SIZE, WARPS, NEW,
            )  # fmt: skip

            if FP8:
                acc = dims_in_order(acc)
            acc, m, total = merge_warps(acc, m, total, HEAD_DIM, WARPS, rows_layout)
            if NEW:
                new_v = gl.where(mine, new_v.to(gl.float32), 0.0)  # what is not attended to may be NaN
                acc, m, total = attend_token(score, new_v, acc, m, total)
            acc *= v_scale
            rows_ptr = out_ptr + (seq.to(gl.int64) * num_heads + head) * GROUP * HEAD_DIM
            if (begin == 0) & (end == tiles):
                # A sequence without tokens gets zeros.
                store_rows(rows_ptr, gl.where(length > 0, acc / total[:, None], 0.0), GROUP, HEAD_DIM)
            else:
                # From one piece to the next the part is another, or the sequence, or both: their sum names a piece.
                store_partial(acc_ptr, ml_ptr, (part + seq) * num_heads + head, acc, m, total, GROUP, HEAD_DIM)
                first_part = first_unit // share
                pieces = (first_unit + tiles - 1) // share - first_part + 1
                if arrived_last(counters_ptr + seq * num_heads + head, pieces):
                    merged = merge_partials(
                        acc_ptr, ml_ptr, (first_part + seq) * num_heads + head, num_heads, pieces, GROUP, HEAD_DIM, CHUNK,
                        rows_layout, WARPS,
                    )  # fmt: skip
                    store_rows(rows_ptr, merged, GROUP, HEAD_DIM)
            first_unit += tiles + 1
            begin = 0
            seq += 1
            length = following
