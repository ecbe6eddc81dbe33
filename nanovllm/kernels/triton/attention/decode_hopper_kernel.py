"""Decode attention for Hopper: keys and values stream through shared memory, asked for before there are queries.

As in `decode_kernel.py` a program has a piece of a sequence under one KV head, the plan is made on the device, and the
program that comes last merges a sequence's pieces. Here one thread asks the copy engine for as many tiles as the
program's ring holds, which takes no registers and outlasts a wait. A slot of the ring is asked to take the next tile as
soon as its tile is in registers, before any arithmetic.

With NEW the queries come as the QKV projection gives them, and so do the new token's key and value. Cached tokens do
not depend on it: the ring is asked for before the program waits for the projection. The new token is attended to from
registers by the program with the sequence's last piece, which also writes it to the cache. Without NEW the kernel
before this one may have stored that token, so that the wait comes first.

It is written in Gluon, Triton's lower level: Triton itself has no copies that outlast a wait, and no softmax without
exchange between warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from nanovllm.kernels.triton.attention.attend import attend_token
from nanovllm.kernels.triton.attention.decode_hopper_cluster import (
    await_partials,
    begin_exchange,
    meet,
    send_partial,
)
from nanovllm.kernels.triton.attention.decode_hopper_fp8 import dims_in_order, scale_of_head
from nanovllm.kernels.triton.attention.decode_hopper_merge import (
    arrived_last,
    merge_partials,
    merge_warps,
    store_partial,
    store_rows,
)
from nanovllm.kernels.triton.attention.decode_hopper_operands import key_operands, query_operands
from nanovllm.kernels.triton.attention.decode_hopper_pieces import find_piece
from nanovllm.kernels.triton.attention.decode_hopper_tiles import attend_tile, request_tile, tile_view
from nanovllm.kernels.triton.attention.decode_hopper_token import (
    acquire,
    load_halves,
    load_pair,
    load_values,
    release,
    rotated,
    score_token,
    store_token,
    whole_layout,
)
from nanovllm.kernels.triton.gluon_compat import reinterpret, warps_barrier


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@gluon.jit(
    do_not_specialize=["num_seqs", "table_stride", "most_pieces", "least"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def decode_hopper_kernel(
    out_ptr,  # [num_seqs, num_kv_heads, GROUP, HEAD_DIM]
    q_ptr,  # [num_seqs, num_kv_heads * GROUP, HEAD_DIM], any strides between tokens and heads; so are the next two
    new_k_ptr,  # [num_seqs, num_kv_heads, HEAD_DIM], if NEW
    new_v_ptr,
    # Tiles, [TILE / BOX, columns, BOX, 1, LINE] of [slots / BOX, columns, BOX, KV heads, LINE], 16 bits.
    k_whole_descriptor,
    v_whole_descriptor,
    k_part_descriptor,  # boxes of a tile, [1, columns, BOX, 1, LINE] of the same
    v_part_descriptor,
    k_ptr,  # what the descriptors describe, for the new token
    v_ptr,
    table_ptr,
    lens_ptr,
    k_scale_ptr,  # [1] or [num_kv_heads] float32; anything where there is none
    v_scale_ptr,
    acc_ptr,  # [pieces, num_kv_heads, GROUP, HEAD_DIM] float32
    ml_ptr,  # [pieces, num_kv_heads, 2, GROUP] float32
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
    most_pieces,
    least,  # tiles that no sequence is cut below
    SEQS_PAD: gl.constexpr,
    EMPTY_LAST: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    BOX: gl.constexpr,  # keys a request
    SLOTS: gl.constexpr,  # tiles in shared memory at a time
    CHUNK: gl.constexpr,  # partial results that are merged at a time
    # Whether the last token comes with the call, and not in the cache; queries are then to be rotated.
    NEW: gl.constexpr,
    NORM: gl.constexpr,  # and normalised
    FP8: gl.constexpr,  # the caches are float8_e4m3fn, and the descriptors of words of two elements
    K_SCALES: gl.constexpr,  # with FP8; 0: no scale, 1: one, 2: one a head
    V_SCALES: gl.constexpr,
    RELEASE: gl.constexpr,  # the kernel after this one may start before this one ends
    CLUSTER: gl.constexpr,  # blocks of a cluster, within which partial results go from block to block; 0: no clusters
    SOFT_CAP: gl.constexpr,  # 0: none
    WINDOW: gl.constexpr,  # tokens that are attended to, the last one among them; 0: all
):
    """Grid [num_kv_heads, pieces], or [CLUSTER, num_kv_heads, pieces / CLUSTER].

    Programmatic dependent launch, WARPS warps.
    """
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

    if CLUSTER:
        exchange = begin_exchange(CLUSTER, GROUP, HEAD_DIM)
    if not NEW:
        gdc_wait()
    if CLUSTER:
        head = gl.program_id(1)
        num_heads = gl.num_programs(1)
        program = gl.program_id(2) * CLUSTER + gl.program_id(0)
        num_programs = gl.num_programs(2) * CLUSTER
    else:
        head = gl.program_id(0)
        num_heads = gl.num_programs(0)
        program = gl.program_id(1)
        num_programs = gl.num_programs(1)
    seq, length, first_piece, piece, share = find_piece(
        program, num_programs, lens_ptr, num_seqs, most_pieces, least, NEW, SEQS_PAD, TILE, EMPTY_LAST, CLUSTER, WINDOW
    )
    if CLUSTER:
        meet()  # by all programs, so that none ends with an arrival that it has not waited for
    if seq >= 0:
        end_token = gl.maximum(length - NEW, 0)  # of the cached tokens; also where a new one goes
        first_token = 0
        first_tile = 0
        if WINDOW > 0:
            first_token = gl.maximum(length - WINDOW, 0)
            first_tile = first_token // TILE
        tiles = gl.cdiv(end_token, TILE) - first_tile
        pieces = gl.cdiv(gl.maximum(tiles, 1), share)
        index = piece - first_piece
        if index < pieces:
            row = gl.cast(seq, gl.int64)
            table_ptr += row * table_stride
            begin = first_tile + index * tiles // pieces
            end = first_tile + (index + 1) * tiles // pieces
            mine = (index == pieces - 1) & (length > 0)
            acquire()
            # All of them before the first request, which waits for its own.
            blocks = ()
            for i in gl.static_range(SLOTS + 1):
                tile = begin + i
                at = table_ptr + tile * TILE // BLOCK_SIZE
                blocks = blocks + (gl.load(at, mask=tile < end, other=0, cache_modifier=".cg"),)
            if NEW:
                new_block = gl.load(table_ptr + end_token // BLOCK_SIZE, mask=mine, other=0, cache_modifier=".cg")
            for i in gl.static_range(SLOTS):
                mbarrier.init(full.index(i), count=1)
            fence_async_shared()
            warps_barrier()
            for i in gl.static_range(SLOTS):
                if begin + i < end:
                    request_tile(
                        descriptors, k_tiles.index(i), v_tiles.index(i), full.index(i), blocks[i], begin + i, head,
                        end_token,
                        BLOCK_SIZE, TILE, BOX,
                    )  # fmt: skip
            k_scale = scale_of_head(k_scale_ptr, head, K_SCALES)
            v_scale = scale_of_head(v_scale_ptr, head, V_SCALES)
            scale *= k_scale
            if NEW:
                cos, sin = load_pair(cos_sin_ptr + end_token.to(gl.int64) * cos_sin_stride, HEAD_DIM, WARPS)
                q_low_weight, q_high_weight = cos, sin
                k_low_weight, k_high_weight = cos, sin
                if NORM:
                    q_low_weight, q_high_weight = load_pair(q_weight_ptr, HEAD_DIM, WARPS)
                    k_low_weight, k_high_weight = load_pair(k_weight_ptr, HEAD_DIM, WARPS)
                gdc_wait()  # what was read so far is not the projection's

            q_ptr += row * q_stride_seq + head * GROUP * q_stride_head
            q_low, q_high = load_halves(q_ptr, q_stride_head, GROUP, HEAD_DIM, WARPS)
            if NEW:
                # Every program has the new token, in each of its rows, and one makes use of it.
                k_low, k_high = load_halves(
                    new_k_ptr + row * new_k_stride_seq + head * new_k_stride_head, 0, 8, HEAD_DIM, WARPS
                )
                new_v = load_values(new_v_ptr + row * new_v_stride_seq + head * new_v_stride_head, HEAD_DIM, WARPS)
                q_low, q_high = rotated(q_low, q_high, q_low_weight, q_high_weight, cos, sin, eps, HEAD_DIM, NORM)
            low, high, tile_scale = query_operands(q_low, q_high, scale, mma, WARPS, FP8)
            if NEW:
                k_low, k_high = rotated(k_low, k_high, k_low_weight, k_high_weight, cos, sin, eps, HEAD_DIM, NORM)
                slot = new_block.to(gl.int64) * BLOCK_SIZE + end_token % BLOCK_SIZE
                target = slot * stride_slot + head * stride_head
                k_low, k_high, new_v = store_token(
                    k_ptr + target, v_ptr + target, k_low, k_high, new_v, k_scale, v_scale, mine, HEAD_DIM, WARPS, FP8,
                    K_SCALES, V_SCALES,
                )  # fmt: skip
                score = score_token(q_low, q_high, k_low, k_high, scale, mine, HEAD_DIM, WARPS, SOFT_CAP)

            acc = gl.zeros([WARPS, HEAD_DIM, 8], gl.float32, mma)
            m = gl.full([WARPS, 8], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
            total = gl.zeros([WARPS, 16, 8], gl.float32, mma)
            block = blocks[SLOTS]
            place = 0
            phase = 0
            for tile in range(begin, end):
                mbarrier.wait(full.index(place), phase)
                k = reinterpret(k_tiles.index(place), dtype, [WARPS, 16, WORDS], VIEW).load(k_operand)
                v = (
                    reinterpret(v_tiles.index(place), dtype, [WARPS, 16, WORDS], VIEW)
                    .permute([0, 2, 1])
                    .load(k_operand)
                )
                later = tile + SLOTS
                if later < end:
                    warps_barrier()  # every warp has its part of the tile
                    request_tile(
                        descriptors, k_tiles.index(place), v_tiles.index(place), full.index(place), block, later, head,
                        end_token,
                        BLOCK_SIZE, TILE, BOX,
                    )  # fmt: skip
                # Read a tile ahead: a request would otherwise wait for the table.
                block = gl.load(
                    table_ptr + (later + 1) * TILE // BLOCK_SIZE, mask=later + 1 < end, other=0, cache_modifier=".cg"
                )
                tile_low, tile_high = key_operands(k, mma, FP8)
                acc, m, total = attend_tile(
                    low, high, tile_low, tile_high, v, tile * TILE, first_token, end_token, tile_scale, acc, m, total,
                    mma, WARPS, FP8, SOFT_CAP, WINDOW,
                )  # fmt: skip
                place += 1
                if place == SLOTS:
                    place = 0
                    phase ^= 1
                if RELEASE and tile == begin:
                    # Not before: the stores have arrived by now, so that nobody waits for them.
                    release(mine, NEW)
            if RELEASE and begin == end:
                release(mine, NEW)

            if FP8:
                acc = dims_in_order(acc)
            acc, m, total = merge_warps(acc, m, total, HEAD_DIM, WARPS, rows_layout)
            if NEW:
                new_v = gl.where(mine, new_v.to(gl.float32), 0.0)  # what is not attended to may be NaN
                acc, m, total = attend_token(score, new_v, acc, m, total)
            acc *= v_scale
            out_ptr += (row * num_heads + head) * GROUP * HEAD_DIM
            if pieces == 1:
                # A sequence without tokens gets zeros.
                store_rows(out_ptr, gl.where(length > 0, acc / total[:, None], 0.0), GROUP, HEAD_DIM)
            else:
                together = False
                if CLUSTER:
                    first_rank = gl.program_id(0) - index
                    together = (first_rank >= 0) & (first_rank + pieces <= CLUSTER)
                    if together & (index > 0):
                        send_partial(exchange, first_rank, index, acc, m, total, CLUSTER, GROUP, HEAD_DIM)
                    elif together:
                        await_partials(exchange, pieces - 1, acc, m, total, CLUSTER, GROUP, HEAD_DIM)
                        merged = merge_partials(
                            exchange, ml_ptr, 0, 1, pieces, GROUP, HEAD_DIM, CHUNK, rows_layout, WARPS, CLUSTER
                        )
                        store_rows(out_ptr, merged, GROUP, HEAD_DIM)
                if not together:
                    store_partial(acc_ptr, ml_ptr, piece * num_heads + head, acc, m, total, GROUP, HEAD_DIM)
                    if arrived_last(counters_ptr + seq * num_heads + head, pieces):
                        first = first_piece * num_heads + head
                        merged = merge_partials(
                            acc_ptr, ml_ptr, first, num_heads, pieces, GROUP, HEAD_DIM, CHUNK, rows_layout, WARPS
                        )
                        store_rows(out_ptr, merged, GROUP, HEAD_DIM)
