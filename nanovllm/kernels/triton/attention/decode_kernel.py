"""Decode attention: one kernel that finds its piece (`decode_pieces.py`), attends, and merges.

The programs are far more than the multiprocessors, or all resident at once, and the hardware deals them out. The
program that arrives last at a sequence's counter merges its pieces, in order, and zeroes the counter for the next
launch.

With ROTATE the queries come as the QKV projection gives them, and so do the new token's key and value: every program
normalises and rotates its own queries, and the one with the sequence's last piece attends to the new token from
registers and writes it to the cache, where no program reads it in this launch. So with EARLY a program asks for a tile
before it waits for the projection. With QUERIES > 1 a sequence has QUERIES query tokens, its last ones. The rows of a
tile are then the query heads of a KV head, for one token after the other, each with its own last key. Tokens that do
not fit into a tile are a second tile with its own programs. With SHARED the kernel starts behind the tokens that a
sequence shares with others, and the sequence's first piece starts from the result of `shared_kernel`.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.attend import attend, attend_token, load_tile, token_score
from nanovllm.kernels.triton.attention.decode_pieces import find_piece, num_tiles
from nanovllm.kernels.triton.attention.queries_and_partials import (
    load_queries,
    load_query_tokens,
    merge_partials,
    normalised,
    repeated,
    store_partial,
    store_rows,
    store_tokens,
)
from nanovllm.kernels.triton.attention.rotate import cached_value, load_heads, rotate_heads, store_new_token
from nanovllm.kernels.triton.attention.shared_kernel import shared_start
from nanovllm.kernels.triton.device_memory import fence, prefetch
from nanovllm.kernels.triton.rows.move_rows import quantised


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def decode_kernel(
    out_ptr,  # [num_seqs, QUERIES, num_kv_heads, GROUP, HEAD_DIM]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    k_scale_ptr,  # [1] or [num_kv_heads] float32; anything where there is none
    v_scale_ptr,
    acc_ptr,  # [pieces, columns, TOKENS * GROUP, HEAD_DIM] float32
    ml_ptr,  # [pieces, columns, 2, TOKENS * GROUP] float32
    counters_ptr,  # [num_seqs, columns] int32, zero before and after
    new_k_ptr,  # [num_seqs, num_kv_heads, HEAD_DIM], and what follows, if ROTATE
    new_v_ptr,
    cos_sin_ptr,  # [max_position, HEAD_DIM] float32
    q_weight_ptr,  # [HEAD_DIM], if NORM
    k_weight_ptr,
    shared_lens_ptr,  # [num_seqs] int32, and what follows as in `shared_start`, if SHARED
    shared_counts_ptr,
    shared_acc_ptr,
    shared_ml_ptr,
    num_seqs,
    q_stride_seq,
    q_stride_head,
    new_k_stride_seq,
    new_k_stride_head,
    new_v_stride_seq,
    new_v_stride_head,
    cos_sin_stride,
    eps,
    stride_block,
    stride_slot,
    stride_head,
    table_stride,
    scale,
    PIECES: tl.constexpr,
    LEAST: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    QUERIES: tl.constexpr,  # tokens of each sequence; 1 with ROTATE and with SHARED
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # a power of two: the query heads of a tile's tokens, of as many tokens as it has room for
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    K_SCALES: tl.constexpr,  # 0: no scale, 1: one, 2: one a head
    V_SCALES: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    SHARED: tl.constexpr,  # without WINDOW
    EARLY: tl.constexpr,  # whether a piece's last tile is loaded first; with ROTATE, without SHARED
    DEPENDENT: tl.constexpr,  # the launch overlaps the end of the kernel before it
    RELEASE: tl.constexpr,  # and the start of the one after it, this one
):
    """Grid [columns, pieces]: the heads of a piece, whose keys lie side by side, run at the same time.

    A column is a KV head and a tile of query tokens, one if they have room in it.
    """
    if DEPENDENT and not EARLY:
        tl.extra.cuda.gdc_wait()
    NEW: tl.constexpr = 1 if ROTATE else 0
    ROWS: tl.constexpr = GROUP_PAD if GROUP_PAD > 16 else 16
    TOKENS: tl.constexpr = QUERIES if QUERIES * GROUP <= GROUP_PAD else GROUP_PAD // GROUP
    TILES: tl.constexpr = (QUERIES + TOKENS - 1) // TOKENS
    # What the queries of a sequence see together.
    SPAN: tl.constexpr = WINDOW + QUERIES - 1 if WINDOW > 0 else 0
    column = tl.program_id(0)
    columns = tl.num_programs(0)
    head = column
    num_heads = columns
    if TILES > 1:
        head = column // TILES
        num_heads = columns // TILES
    piece = tl.program_id(1)
    k_ptr += head * stride_head
    v_ptr += head * stride_head
    # What is read before the wait comes from L2: the first-level cache may hold what was there before an earlier kernel
    # wrote.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    seq, length, first_piece, share = find_piece(
        piece, lens_ptr, shared_lens_ptr, num_seqs, PIECES, LEAST, SEQS_PAD, TILE, SPAN, SHARED, NEW, EARLY
    )
    if seq >= 0:
        first_token = 0
        if WINDOW > 0:
            first_token = tl.maximum(length - SPAN, 0)
        shared = 0
        if SHARED:
            shared = tl.load(shared_lens_ptr + seq)
            first_token = shared
        tiles = num_tiles(length, shared, NEW, TILE, SPAN)
        pieces = tl.cdiv(tl.maximum(tiles, 1), share)
        index = piece - first_piece
        if index < pieces:
            row = tl.cast(seq, tl.int64)
            table_ptr += row * table_stride
            begin = first_token // TILE + index * tiles // pieces
            end = first_token // TILE + (index + 1) * tiles // pieces
            end_token = length - NEW
            position = tl.maximum(length - 1, 0)
            if ROTATE:
                new_block = tl.load(table_ptr + position // BLOCK_SIZE, cache_modifier=CACHE)
            loaded = None
            if EARLY:
                # Tokens of earlier steps: they do not depend on the kernel before this one. A piece without tiles has
                # no live one.
                last = tl.maximum(end - 1, 0)
                block = tl.load(table_ptr + last * TILE // BLOCK_SIZE, cache_modifier=CACHE)
                loaded = load_tile(
                    k_ptr, v_ptr, table_ptr, block, last, first_token, tl.where(begin < end, end_token, 0),
                    stride_block,
                    stride_slot, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PAD, FP8, False, True,
                )  # fmt: skip
                end = last
                if NORM:
                    prefetch(q_weight_ptr, HEAD_DIM)
                    prefetch(k_weight_ptr, HEAD_DIM)
                if DEPENDENT:
                    tl.extra.cuda.gdc_wait()
            if K_SCALES == 1:
                scale *= tl.load(k_scale_ptr)
            elif K_SCALES == 2:
                scale *= tl.load(k_scale_ptr + head)
            row_ends = None
            if QUERIES > 1:
                first_query = column % TILES * TOKENS
                count = tl.minimum(QUERIES - first_query, TOKENS)
                row_ends = length - QUERIES + 1 + first_query + tl.arange(0, ROWS) // GROUP
                row = row * QUERIES + first_query
            q_ptr += row * q_stride_seq + head * GROUP * q_stride_head
            start = None
            if SHARED:
                start = shared_start(
                    shared_acc_ptr, shared_ml_ptr, shared_counts_ptr, seq, head, num_seqs, num_heads,
                    tl.where(index == 0, shared, 0), GROUP, GROUP_PAD, ROWS, HEAD_DIM, DIM_PAD, CHUNK,
                )  # fmt: skip
            if ROTATE:
                # Every program has the new token, and one makes use of it: a branch would wait for the queries before
                # it loads.
                angles = cos_sin_ptr + position.to(tl.int64) * cos_sin_stride
                rows = tl.arange(0, GROUP_PAD)[:, None]
                one = tl.arange(0, 1)[:, None]
                dims = tl.arange(0, DIM_PAD)[None, :]
                heads = q_ptr + rows * q_stride_head
                new_head = new_k_ptr + row * new_k_stride_seq + head * new_k_stride_head + one
                q = load_heads(heads, q_weight_ptr, angles, rows < GROUP, HEAD_DIM, DIM_PAD, NORM)
                new_k = load_heads(new_head, k_weight_ptr, angles, one < 1, HEAD_DIM, DIM_PAD, NORM)
                new_v_ptr += row * new_v_stride_seq + head * new_v_stride_head
                new_v = tl.load(new_v_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
                q = rotate_heads(q, eps, HEAD_DIM, NORM)
                new_k = rotate_heads(new_k, eps, HEAD_DIM, NORM)
                new_k = quantised(new_k, k_scale_ptr, head, k_ptr.dtype.element_ty, K_SCALES, FP8)
                new_v = quantised(new_v, v_scale_ptr, head, k_ptr.dtype.element_ty, V_SCALES, FP8)
                mine = (index == pieces - 1) & (length > 0)
                store_new_token(
                    new_k, new_v, k_ptr, v_ptr, new_block, position, mine, stride_block, stride_slot, BLOCK_SIZE,
                    HEAD_DIM, FP8,
                )  # fmt: skip
                if RELEASE:
                    if mine:
                        # A kernel like this one may come next, and read the token before it waits.
                        fence()
                        tl.debug_barrier()
                    tl.extra.cuda.gdc_launch_dependents()
                new_score = token_score(q, cached_value(new_k, FP8), scale, SOFT_CAP)
                new_score = repeated(tl.where(mine, new_score, float("-inf"))[:, None], ROWS)
                new_v = tl.where(mine, cached_value(new_v, FP8), 0.0)  # what is not attended to may be NaN
                q = repeated(q, ROWS)
            else:
                if QUERIES > 1:
                    q = load_query_tokens(q_ptr, q_stride_seq, q_stride_head, count, GROUP, ROWS, HEAD_DIM, DIM_PAD)
                else:
                    q = load_queries(q_ptr, q_stride_head, GROUP, ROWS, HEAD_DIM, DIM_PAD)
                if RELEASE:
                    tl.extra.cuda.gdc_launch_dependents()
            acc, m, total = attend(
                q,
                k_ptr,
                v_ptr,
                table_ptr,
                begin,
                end,
                first_token,
                end_token,
                stride_block,
                stride_slot,
                scale,
                BLOCK_SIZE,
                TILE,
                HEAD_DIM,
                SOFT_CAP,
                STAGES,
                FP8,
                start,
                loaded,
                # The new token is all there is to attend to, or a query comes before a tile.
                EMPTY=(ROTATE and WINDOW == 1) or QUERIES > 1,
                row_ends=row_ends,
                WINDOW=WINDOW,
            )
            if ROTATE:
                acc, m, total = attend_token(tl.sum(new_score, 1), new_v, acc, m, total)
            if V_SCALES == 1:
                acc *= tl.load(v_scale_ptr)
            elif V_SCALES == 2:
                acc *= tl.load(v_scale_ptr + head)
            out_ptr += (row * num_heads + head) * GROUP * HEAD_DIM
            if pieces == 1:
                # A sequence without tokens gets zeros, and so does a query before its first one.
                if QUERIES > 1:
                    acc = normalised(acc, total)
                    store_tokens(out_ptr, acc, num_heads * GROUP * HEAD_DIM, count, GROUP, HEAD_DIM)
                else:
                    acc = tl.where(length > 0, acc / total[:, None], 0.0)
                    store_rows(out_ptr, acc, HEAD_DIM, GROUP, HEAD_DIM)
            else:
                store_partial(acc_ptr, ml_ptr, piece * columns + column, acc, m, total, TOKENS * GROUP, HEAD_DIM)
                # Every thread's stores come before the arrival, which one thread makes.
                tl.debug_barrier()
                counter = counters_ptr + seq * columns + column
                if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                    tl.store(counter, 0)
                    first = first_piece * columns + column
                    merged = merge_partials(
                        acc_ptr, ml_ptr, first, columns, pieces, TOKENS * GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, CHUNK,
                        QUERIES > 1,
                    )  # fmt: skip
                    if QUERIES > 1:
                        store_tokens(out_ptr, merged, num_heads * GROUP * HEAD_DIM, count, GROUP, HEAD_DIM)
                    else:
                        store_rows(out_ptr, merged, HEAD_DIM, GROUP, HEAD_DIM)
