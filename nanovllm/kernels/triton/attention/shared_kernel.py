"""Decode attention over prefixes that sequences share: the pass over the shared part, and how the pass over the rest
takes it up.

A group of sequences has the same leading blocks. Its query rows (sequences x query heads of a KV head) are cut into
tiles of ROWS, its shared tokens into tiles of TILE, and a *unit* is one of each. The units of all groups in a row,
those of a row tile side by side, are dealt to the programs in equal stretches; a program takes its stretch row tile by
row tile, and a row tile has as many pieces as programs have a part of it. Everything follows from the groups alone, on
the device, so that a captured graph replays with any groups and the same groups give the same bits.

A piece leaves (sum of p v, maximum, sum of p) of each row in float32, as in `attend.py`. The decode kernel, which comes
behind it, merges a sequence's pieces in order, and goes on from there with the tokens that the sequence has for itself.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.attend import attend
from nanovllm.kernels.triton.attention.rotate import load_heads, rotate_heads, rotated_halves


@triton.jit
def shared_start(
    acc_ptr,  # [PIECES, num_seqs, num_heads, HEAD_DIM] float32
    ml_ptr,  # [PIECES, 2, num_seqs, num_heads] float32
    counts_ptr,  # [num_seqs, GROUP] int32
    seq,
    head,
    num_seqs,
    num_kv_heads,
    tokens,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What a sequence's heads have of the shared part, merged: (acc [ROWS, DIM_PAD], m [ROWS], total [ROWS]) for
    `attend`.

    Nothing (0, -inf, 0) where it has no such `tokens`. Rows beyond GROUP repeat rows before them; their results
    are not used.
    """
    groups = tl.minimum(tl.arange(0, GROUP_PAD), GROUP - 1)
    dims = tl.arange(0, DIM_PAD)
    heads = (num_kv_heads * GROUP).to(tl.int64)
    counts = tl.load(counts_ptr + seq * GROUP + groups, mask=groups * 0 < tokens, other=0)
    m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(0, tl.max(counts, 0), CHUNK):
        i = start + tl.arange(0, CHUNK)
        live = i[:, None] < counts[None, :]
        rows = (head * GROUP + groups)[None, :]
        ml = ml_ptr + (2 * i[:, None] * num_seqs + seq) * heads + rows
        part_m = tl.load(ml, mask=live, other=float("-inf"), cache_modifier=".cg")  # [CHUNK, GROUP_PAD]
        part_total = tl.load(ml + num_seqs * heads, mask=live, other=0.0, cache_modifier=".cg")
        row = (i[:, None] * num_seqs + seq) * heads + rows
        part_acc = tl.load(
            acc_ptr + row[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # A row of fewer pieces than another has its maximum by now, so that no difference is inf - inf: every row has a
        # piece 0.
        new_m = tl.maximum(m, tl.max(part_m, 0))
        alpha = tl.exp2(m - new_m)
        weights = tl.exp2(part_m - new_m[None, :])
        # Selected once more, as in `merge_partials`.
        total = total * alpha + tl.sum(tl.where(live, part_total * weights, 0.0), 0)
        acc = acc * alpha[:, None] + tl.sum(tl.where(live[:, :, None], part_acc * weights[:, :, None], 0.0), 0)
        m = new_m
    REPEATS: tl.constexpr = ROWS // GROUP_PAD
    if REPEATS > 1:
        acc = tl.reshape(tl.broadcast_to(acc[None, :, :], [REPEATS, GROUP_PAD, DIM_PAD]), [ROWS, DIM_PAD])
        m = tl.reshape(tl.broadcast_to(m[None, :], [REPEATS, GROUP_PAD]), [ROWS])
        total = tl.reshape(tl.broadcast_to(total[None, :], [REPEATS, GROUP_PAD]), [ROWS])
    return acc, m, total


# As in `decode_kernel`, nothing that differs from batch to batch is specialised on.
@triton.jit(
    do_not_specialize=["num_seqs", "num_groups", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "groups_ptr", "group_rows_ptr"],
)
def shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,  # [num_seqs] int32, if ROTATE
    groups_ptr,  # [num_groups, 3] int32: where the group's rows begin, how many they are, the tokens that they share
    group_rows_ptr,  # [num_seqs] int32: sequences, group after group
    k_scale_ptr,  # [1] or [num_kv_heads] float32; anything where there is none
    acc_ptr,  # [PIECES, num_seqs, num_heads, HEAD_DIM] float32
    ml_ptr,  # [PIECES, 2, num_seqs, num_heads] float32
    counts_ptr,  # [num_seqs, GROUP] int32: the pieces of each row
    cos_sin_ptr,  # [max_position, HEAD_DIM] float32, if ROTATE
    q_weight_ptr,  # [HEAD_DIM], if NORM
    num_seqs,
    num_groups,
    q_stride_seq,
    q_stride_head,
    cos_sin_stride,
    eps,
    stride_block,
    stride_slot,
    stride_head,
    table_stride,
    scale,
    PIECES: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    K_SCALES: tl.constexpr,  # 0: no scale, 1: one, 2: one a head
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,  # the launch overlaps the end of the kernel before it
):
    """Grid [num_kv_heads, programs], PIECES at most of which take part in a row tile; no more programs than run at a
    time.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    num_heads = tl.num_programs(0) * GROUP
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    g = tl.arange(0, GROUPS_PAD)
    there = g < num_groups
    firsts = tl.load(groups_ptr + 3 * g, mask=there, other=0)
    counts = tl.load(groups_ptr + 3 * g + 1, mask=there, other=0)
    tokens = tl.load(groups_ptr + 3 * g + 2, mask=there, other=0)
    tiles = tl.cdiv(tokens, TILE)
    units = tl.cdiv(counts * GROUP, ROWS) * tiles
    ends = tl.cumsum(units, 0)
    all_units = tl.sum(units, 0)
    # A stretch of s units lets a row tile of n have (n - 1) // s + 2 pieces at most.
    share = tl.maximum(tl.cdiv(all_units, programs), tl.cdiv(tl.max(tl.where(units > 0, tiles, 0), 0), PIECES - 1))
    unit = program * share
    end = tl.minimum(unit + share, all_units)
    if K_SCALES == 1:
        scale *= tl.load(k_scale_ptr)
    elif K_SCALES == 2:
        scale *= tl.load(k_scale_ptr + head)
    while unit < end:
        # The group that the unit is of, and where in it.
        mine = (ends - units <= unit) & (unit < ends)
        group_start = tl.sum(tl.where(mine, ends - units, 0), 0)
        first = tl.sum(tl.where(mine, firsts, 0), 0)
        count = tl.sum(tl.where(mine, counts, 0), 0)
        group_tokens = tl.sum(tl.where(mine, tokens, 0), 0)
        group_tiles = tl.cdiv(group_tokens, TILE)
        row_tile = (unit - group_start) // group_tiles
        row_tile_start = group_start + row_tile * group_tiles
        first_tile = unit - row_tile_start
        end_tile = tl.minimum(first_tile + end - unit, group_tiles)
        piece = program - row_tile_start // share

        offs_r = row_tile * ROWS + tl.arange(0, ROWS)
        live = offs_r < count * GROUP
        seqs = tl.load(group_rows_ptr + first + offs_r // GROUP, mask=live, other=0)
        heads = head * GROUP + offs_r % GROUP
        q_rows = q_ptr + (seqs.to(tl.int64) * q_stride_seq + heads * q_stride_head)[:, None]
        if ROTATE:
            positions = tl.maximum(tl.load(lens_ptr + seqs, mask=live, other=1) - 1, 0)
            angles = cos_sin_ptr + (positions.to(tl.int64) * cos_sin_stride)[:, None]
            if HEAD_DIM == DIM_PAD:
                q = rotated_halves(q_rows, q_weight_ptr, angles, eps, live[:, None], HEAD_DIM, NORM)
            else:
                q = load_heads(q_rows, q_weight_ptr, angles, live[:, None], HEAD_DIM, DIM_PAD, NORM)
                q = rotate_heads(q, eps, HEAD_DIM, NORM)
        else:
            dims = tl.arange(0, DIM_PAD)[None, :]
            q = tl.load(q_rows + dims, mask=live[:, None] & (dims < HEAD_DIM), other=0.0)
        # The blocks are the same for all of the group: its first sequence's table is read.
        row = tl.load(group_rows_ptr + first).to(tl.int64)
        acc, m, total = attend(
            q, k_ptr + head * stride_head, v_ptr + head * stride_head, table_ptr + row * table_stride, first_tile,
            end_tile, 0, group_tokens, stride_block, stride_slot, scale, BLOCK_SIZE, TILE, HEAD_DIM, SOFT_CAP, STAGES,
            FP8, WHOLE=BLOCK_SIZE % TILE == 0,
        )  # fmt: skip
        ml = ml_ptr + (2 * piece * num_seqs + seqs).to(tl.int64) * num_heads + heads
        tl.store(ml, m, mask=live)
        tl.store(ml + num_seqs.to(tl.int64) * num_heads, total, mask=live)
        out = acc_ptr + ((piece * num_seqs + seqs).to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM
        dims = tl.arange(0, DIM_PAD)[None, :]
        tl.store(out + dims, acc, mask=live[:, None] & (dims < HEAD_DIM))
        if (head == 0) & (end_tile == group_tiles):
            tl.store(counts_ptr + seqs * GROUP + offs_r % GROUP, seqs * 0 + piece + 1, mask=live)
        unit += end_tile - first_tile
