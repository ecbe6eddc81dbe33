"""Decode attention: one kernel that plans, attends, and merges.

Each sequence is cut into pieces of about the same size over the whole batch, so that a long sequence beside short ones
leaves no multiprocessor idle; the programs are far more than the multiprocessors, or all resident at once, and the hardware
deals them out. Every program derives the whole plan from context_lens, on the device: a captured graph replays with any lengths.
The program that arrives last at a sequence's counter merges its pieces, in order, and zeroes the counter for the next launch.

With ROTATE the queries come as the QKV projection gives them, and so do the new token's key and value: every program normalises
and rotates its own queries, and the one whose piece has the sequence's last token, which no other reads, writes it to the cache first.
With SHARED the kernel starts behind the tokens that a sequence shares with others, and its first piece from what `shared_kernel` has
found for these.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton_attention.common import attend, load_queries, merge_partials, store_partial, store_rows
from nanovllm.kernels.triton_attention.rotate import rotated_rows, store_new_token
from nanovllm.kernels.triton_attention.shared_kernel import shared_start


@triton.jit
def find_piece(
    piece,
    lens_ptr,
    shared_lens_ptr,
    num_seqs,
    PIECES: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
):
    """-> (seq, its first piece, tiles in a piece at most); seq is -1 for a piece that there is not.

    No piece has more than `share` tiles, total / PIECES rounded up, so there are fewer than num_seqs + PIECES of them.
    The pieces of the sequences that are cut come first, since they are the largest.
    """
    if SEQS_PAD == 1:
        shared = tl.load(shared_lens_ptr) if SHARED else 0
        share = tl.cdiv(planned_tiles(tl.load(lens_ptr), shared, TILE, WINDOW), PIECES)
        seq = 0
        first_piece = 0
    else:
        offs = tl.arange(0, SEQS_PAD)
        lens = tl.load(lens_ptr + offs, mask=offs < num_seqs, other=0)
        shared = 0
        if SHARED:
            shared = tl.load(shared_lens_ptr + offs, mask=offs < num_seqs, other=0)
        tiles = planned_tiles(lens, shared, TILE, WINDOW)
        tiles = tl.where(offs < num_seqs, tiles, 0)
        share = tl.cdiv(tl.sum(tiles, 0), PIECES)
        pieces = tl.cdiv(tiles, share)
        cut = tl.where(pieces > 1, pieces, 0)
        whole = tl.where(pieces == 1, 1, 0)
        starts = tl.where(pieces > 1, tl.cumsum(cut, 0) - cut, tl.sum(cut, 0) + tl.cumsum(whole, 0) - whole)
        mine = (starts <= piece) & (piece < starts + pieces)
        found = tl.sum(tl.where(mine, (starts.to(tl.int64) << 32) | (offs + 1), 0), 0)
        seq = (found & 0xFFFFFFFF).to(tl.int32) - 1
        first_piece = (found >> 32).to(tl.int32)
    return seq, first_piece, share


@triton.jit
def num_tiles(length, shared, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Tiles that hold a token to attend to."""
    tiles = tl.cdiv(tl.maximum(length, 0), TILE) - shared // TILE
    if WINDOW > 0:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    return tiles


@triton.jit
def planned_tiles(length, shared, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """At least one, so that some program writes the zeros of a sequence without tokens."""
    return tl.maximum(num_tiles(length, shared, TILE, WINDOW), 1)


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def decode_kernel(
    out_ptr,  # [num_seqs, num_kv_heads, GROUP, HEAD_DIM]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    k_scale_ptr,  # [1] or [num_kv_heads] float32; anything where there is none
    v_scale_ptr,
    acc_ptr,  # [pieces, num_kv_heads, GROUP, HEAD_DIM] float32
    ml_ptr,  # [pieces, num_kv_heads, 2, GROUP] float32
    counters_ptr,  # [num_seqs, num_kv_heads] int32, zero before and after
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
    SEQS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
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
    DEPENDENT: tl.constexpr,  # the launch overlaps the end of the kernel before it
    RELEASE: tl.constexpr,  # and the start of the one after it, this one
):
    """Grid [num_kv_heads, pieces]: the heads of a piece, whose keys lie side by side, run at the same time."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if RELEASE:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    piece = tl.program_id(1)
    seq, first_piece, share = find_piece(
        piece, lens_ptr, shared_lens_ptr, num_seqs, PIECES, SEQS_PAD, TILE, WINDOW, SHARED
    )
    if seq >= 0:
        length = tl.load(lens_ptr + seq)
        first_token = 0
        if WINDOW > 0:
            first_token = tl.maximum(length - WINDOW, 0)
        shared = 0
        if SHARED:
            shared = tl.load(shared_lens_ptr + seq)
            first_token = shared
        tiles = num_tiles(length, shared, TILE, WINDOW)
        pieces = tl.cdiv(tl.maximum(tiles, 1), share)
        index = piece - first_piece
        if index < pieces:
            if K_SCALES == 1:
                scale *= tl.load(k_scale_ptr)
            elif K_SCALES == 2:
                scale *= tl.load(k_scale_ptr + head)
            first_tile = first_token // TILE
            row = tl.cast(seq, tl.int64)
            table_ptr += row * table_stride
            q_ptr += row * q_stride_seq + head * GROUP * q_stride_head
            if ROTATE:
                angles = cos_sin_ptr + tl.maximum(length - 1, 0).to(tl.int64) * cos_sin_stride
                q = rotated_rows(q_ptr, q_stride_head, q_weight_ptr, angles, eps, GROUP, ROWS, HEAD_DIM, DIM_PAD, NORM)
                if (index == pieces - 1) & (length > 0):
                    store_new_token(
                        new_k_ptr + row * new_k_stride_seq + head * new_k_stride_head,
                        new_v_ptr + row * new_v_stride_seq + head * new_v_stride_head,
                        k_weight_ptr,
                        angles,
                        eps,
                        k_ptr + head * stride_head,
                        v_ptr + head * stride_head,
                        table_ptr,
                        length - 1,
                        stride_block,
                        stride_slot,
                        k_scale_ptr,
                        v_scale_ptr,
                        head,
                        BLOCK_SIZE,
                        HEAD_DIM,
                        DIM_PAD,
                        NORM,
                        FP8,
                        K_SCALES,
                        V_SCALES,
                    )
                    # The threads that read the token are not those that wrote it.
                    tl.debug_barrier()
            else:
                q = load_queries(q_ptr, q_stride_head, GROUP, ROWS, HEAD_DIM, DIM_PAD)
            start = None
            if SHARED:
                start = shared_start(
                    shared_acc_ptr,
                    shared_ml_ptr,
                    shared_counts_ptr,
                    seq,
                    head,
                    num_seqs,
                    num_heads,
                    tl.where(index == 0, shared, 0),
                    GROUP,
                    GROUP_PAD,
                    ROWS,
                    HEAD_DIM,
                    DIM_PAD,
                    CHUNK,
                )
            acc, m, total = attend(
                q,
                k_ptr + head * stride_head,
                v_ptr + head * stride_head,
                table_ptr,
                first_tile + index * tiles // pieces,
                first_tile + (index + 1) * tiles // pieces,
                first_token,
                length,
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
            )
            if V_SCALES == 1:
                acc *= tl.load(v_scale_ptr)
            elif V_SCALES == 2:
                acc *= tl.load(v_scale_ptr + head)
            out_ptr += (row * num_heads + head) * GROUP * HEAD_DIM
            if pieces == 1:
                # A sequence without tokens gets zeros.
                acc = acc / tl.where(total == 0, 1.0, total)[:, None]
                store_rows(out_ptr, acc, HEAD_DIM, GROUP, HEAD_DIM)
            else:
                store_partial(acc_ptr, ml_ptr, piece * num_heads + head, acc, m, total, GROUP, HEAD_DIM)
                # Every thread's stores come before the arrival, which one thread makes.
                tl.debug_barrier()
                counter = counters_ptr + seq * num_heads + head
                if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                    tl.store(counter, 0)
                    first = first_piece * num_heads + head
                    merged = merge_partials(
                        acc_ptr, ml_ptr, first, num_heads, pieces, GROUP, GROUP_PAD, HEAD_DIM, DIM_PAD, CHUNK
                    )
                    store_rows(out_ptr, merged, HEAD_DIM, GROUP, HEAD_DIM)
