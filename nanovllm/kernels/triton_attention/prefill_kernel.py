"""Prefill attention: one kernel, in the manner of FlashAttention-2, over the paged KV cache."""

import triton
import triton.language as tl

from nanovllm.kernels.triton_attention.common import soft_cap_scores


@triton.jit
def load_tile(
    ptr,
    descriptor,
    block,  # of the tile's first token, where a tile lies within a block
    table_ptr,
    tile,
    head,
    end_token,
    stride_block,
    stride_slot,
    stride_head,
    PARTIAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TMA: tl.constexpr,
):
    """[TILE, DIM_PAD] keys or values; with PARTIAL, those from end_token on are zero and not read: they may be NaN."""
    if TMA and not PARTIAL:
        return descriptor.load([block * BLOCK_SIZE + tile * TILE % BLOCK_SIZE, head * HEAD_DIM])
    else:
        dims = tl.arange(0, DIM_PAD)
        tokens = tile * TILE + tl.arange(0, TILE)
        ptr += head * stride_head
        if TILE <= BLOCK_SIZE:
            ptr += block.to(tl.int64) * stride_block + tile * TILE % BLOCK_SIZE * stride_slot
            ptrs = ptr + (tl.arange(0, TILE) * stride_slot)[:, None] + dims[None, :]
        else:
            blocks = tl.load(table_ptr + tl.minimum(tokens, end_token - 1) // BLOCK_SIZE).to(tl.int64)
            ptrs = ptr + (blocks * stride_block + tokens % BLOCK_SIZE * stride_slot)[:, None] + dims[None, :]
        if PARTIAL:
            return tl.load(ptrs, mask=(tokens < end_token)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif DIM_PAD == HEAD_DIM:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def softmax_step(
    scores,
    m,
    total,
    acc,
    scale,
    tile,
    masked,
    positions,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Scores of a tile -> (p, m, total, acc), the running values advanced and rescaled; m is in scaled units, base 2."""
    if SOFT_CAP > 0:
        scores = soft_cap_scores(scores * scale, SOFT_CAP)
        scale = 1.0
    if masked:
        tokens = (tile * TILE + tl.arange(0, TILE))[None, :]
        seen = tokens <= positions[:, None]
        if WINDOW > 0:
            seen &= tokens > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * scale)
    shift = new_m
    if WINDOW > 0:
        # A row may have seen nothing so far: its window starts in a later tile.
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(m - shift)
    return p, new_m, total * alpha + tl.sum(p, 1), acc * alpha[:, None]


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lens_ptr"])
def prefill_kernel(
    out_ptr,  # [num_tokens, num_kv_heads, GROUP, HEAD_DIM]
    q_ptr,
    k_ptr,
    v_ptr,
    k_descriptor,
    v_descriptor,
    table_ptr,
    starts_ptr,
    lens_ptr,
    num_seqs,
    q_stride_token,
    q_stride_head,
    stride_block,
    stride_slot,
    stride_head,
    table_stride,
    scale,
    SEQS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """Grid [num_tokens // TOKENS + num_seqs, num_kv_heads]: program (i, h) has up to TOKENS query tokens of one sequence.

    Row r of its tile is the token r // GROUP under query head r % GROUP of KV head h, so short runs fill a tile too.
    Sequence s owns the programs from starts[s] // TOKENS + s on, at least as many as it needs; its last tokens, which see
    the most, come first. One KV head after the other: what the programs in flight read stays in L2.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    program = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    if SEQS_PAD == 1:
        seq = 0
    else:
        offs = tl.arange(0, SEQS_PAD)
        firsts = tl.load(starts_ptr + offs, mask=offs < num_seqs, other=2**30) // TOKENS + offs
        seq = tl.sum((firsts <= program).to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - start
    length = tl.load(lens_ptr + seq)
    first_query = (tl.cdiv(count, TOKENS) - 1 - (program - start // TOKENS - seq)) * TOKENS
    if first_query >= 0:
        num_tokens = tl.minimum(TOKENS, count - first_query)
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM_PAD)
        live = (rows < num_tokens * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        token = rows // GROUP
        begin = (start + first_query).to(tl.int64)
        q_ptr += begin * q_stride_token + head * GROUP * q_stride_head
        q_offsets = (token * q_stride_token + rows % GROUP * q_stride_head)[:, None] + dims[None, :]
        q = tl.load(q_ptr + q_offsets, mask=live, other=0.0)
        first_position = length - count + first_query
        # Rows beyond the run repeat the last token's position, so that every row sees something.
        positions = first_position + tl.minimum(token, num_tokens - 1)
        end_tile = tl.cdiv(first_position + num_tokens, TILE)
        first_tile = 0
        first_masked = (first_position + 1) // TILE
        if WINDOW > 0:
            first_tile = tl.maximum(first_position - WINDOW + 1, 0) // TILE
            first_masked = 0
        # Tiles whose slots are all written; a sequence's last tile may have others, and comes after the loop. In float32
        # that code would be unrolled into spilling registers, so there every load is masked instead.
        MASK_LOADS: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
        end_full = end_tile
        if not MASK_LOADS:
            end_full = tl.minimum(end_tile, length // TILE)
        table_ptr += tl.cast(seq, tl.int64) * table_stride
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        # Read a tile ahead: the address of a tile's first load would otherwise wait for the table.
        block = tl.load(table_ptr + first_tile * TILE // BLOCK_SIZE)
        for tile in tl.range(first_tile, end_full, num_stages=STAGES):
            k = load_tile(
                k_ptr, k_descriptor, block, table_ptr, tile, head, length, stride_block, stride_slot, stride_head,
                MASK_LOADS, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PAD, TMA,
            )  # fmt: skip
            v = load_tile(
                v_ptr, v_descriptor, block, table_ptr, tile, head, length, stride_block, stride_slot, stride_head,
                MASK_LOADS, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PAD, TMA,
            )  # fmt: skip
            block = tl.load(table_ptr + tl.minimum(tile + 1, end_tile - 1) * TILE // BLOCK_SIZE)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            p, m, total, acc = softmax_step(
                scores, m, total, acc, scale, tile, tile >= first_masked, positions, TILE, SOFT_CAP, WINDOW
            )
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        if not MASK_LOADS:
            if end_full < end_tile:
                k = load_tile(
                    k_ptr, k_descriptor, block, table_ptr, end_full, head, length, stride_block, stride_slot, stride_head,
                    True, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PAD, TMA,
                )  # fmt: skip
                v = load_tile(
                    v_ptr, v_descriptor, block, table_ptr, end_full, head, length, stride_block, stride_slot, stride_head,
                    True, BLOCK_SIZE, TILE, HEAD_DIM, DIM_PAD, TMA,
                )  # fmt: skip
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                p, m, total, acc = softmax_step(scores, m, total, acc, scale, end_full, True, positions, TILE, SOFT_CAP, WINDOW)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        out_ptr += (begin * heads + head) * GROUP * HEAD_DIM
        out_offsets = ((token * heads * GROUP + rows % GROUP) * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live)
