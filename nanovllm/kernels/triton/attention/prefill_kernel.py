"""Prefill attention for any GPU and any layout: one kernel, in the manner of FlashAttention-2, over the paged KV
cache.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.attention.attend import soft_cap_scores


@triton.jit
def dequantised(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """A tile of the cache in `dtype`; float8_e4m3fn comes as int8, since not every GPU that runs this knows it.

    The 7 lower bits of a float8, moved to the exponent and mantissa of a float16, are its value / 256, subnormals
    included.
    """
    if FP8:
        bits = x.to(tl.int16)
        value = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (value.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def attend_causal(
    acc,
    m,
    total,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    positions,  # [ROWS]: of the query tokens
    first_tile,
    end_tile,
    end_token,
    stride_block,
    stride_slot,
    scale,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Advance (acc, m, total) over the tiles [first_tile, end_tile); without MASKED, every query sees all of their
    tokens.
    """
    DIM_PAD: tl.constexpr = q.shape[1]
    offs_t = tl.arange(0, TILE)
    offs_d = tl.arange(0, DIM_PAD)
    offsets = (offs_t * stride_slot)[:, None] + offs_d[None, :]
    # Read a tile ahead: the address of a tile's first load would otherwise wait for the table.
    block = tl.load(table_ptr + first_tile * TILE // BLOCK_SIZE, mask=first_tile < end_tile, other=0)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        tokens = tile * TILE + offs_t
        live = tokens < end_token
        if BLOCK_SIZE % TILE == 0:
            base = block.to(tl.int64) * stride_block + (tile * TILE % BLOCK_SIZE) * stride_slot
            k_tile = (k_ptr + base) + offsets
            v_tile = (v_ptr + base) + offsets
            block = tl.load(table_ptr + tl.minimum(tile + 1, end_tile - 1) * TILE // BLOCK_SIZE)
        else:
            blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            rows = (blocks * stride_block + tokens % BLOCK_SIZE * stride_slot)[:, None] + offs_d[None, :]
            k_tile = k_ptr + rows
            v_tile = v_ptr + rows
        # Dead slots may hold NaN, and 0 * NaN is NaN: they are not read.
        if MASKED:
            mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_tile, mask=mask, other=0)
            v = tl.load(v_tile, mask=mask, other=0)
        elif DIM_PAD == HEAD_DIM:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        else:
            k = tl.load(k_tile, mask=(offs_d < HEAD_DIM)[None, :], other=0)
            v = tl.load(v_tile, mask=(offs_d < HEAD_DIM)[None, :], other=0)
        scores = tl.dot(q, tl.trans(dequantised(k, q.dtype, FP8)), input_precision="ieee")
        if SOFT_CAP > 0:
            scores = soft_cap_scores(scores * scale, SOFT_CAP)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen &= tokens[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        # The scale is folded into the exponent, one fused multiply-add an element; m holds scaled values.
        if SOFT_CAP > 0:
            new_m = tl.maximum(m, tl.max(scores, 1))
        else:
            new_m = tl.maximum(m, tl.max(scores, 1) * scale)
        if MASKED:
            # A row may see nothing of a tile that others see, and nothing before it either.
            shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        else:
            shift = new_m
        if SOFT_CAP > 0:
            p = tl.exp2(scores - shift[:, None])
        else:
            p = tl.exp2(scores * scale - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        v = dequantised(v, q.dtype, FP8)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = new_m
    return acc, m, total


# What differs from batch to batch is not specialised on: it would compile the kernel again, in the middle of serving.
@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lens_ptr"],
)
def prefill_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    FP8: tl.constexpr,
    K_SCALES: tl.constexpr,  # 0: none, 1: one for all heads, 2: one a head
    V_SCALES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid [num_kv_heads, num_tokens // TOKENS + num_seqs]: program (h, i) has up to TOKENS query tokens of one
    sequence.

    Row r of its tile is the token r // GROUP under query head r % GROUP of KV head h. Sequence s owns the programs from
    starts[s] // TOKENS + s on, at least as many as it needs; its last tokens, which see the most, come first.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    program = tl.program_id(1)
    if SEQS_PAD == 1:
        seq = 0
    else:
        offs = tl.arange(0, SEQS_PAD)
        firsts = tl.load(starts_ptr + offs, mask=offs < num_seqs, other=2**30) // TOKENS + offs
        seq = tl.sum((firsts <= program).to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - start
    first_token = (tl.cdiv(count, TOKENS) - 1 - (program - start // TOKENS - seq)) * TOKENS
    if first_token >= 0:
        length = tl.load(lens_ptr + seq)
        num_tokens = tl.minimum(TOKENS, count - first_token)
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM_PAD)
        live = (row < num_tokens * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        token = row // GROUP
        begin = (start + first_token).to(tl.int64)
        q_ptr += begin * q_stride_token + head * GROUP * q_stride_head
        q = tl.load(
            q_ptr + (token * q_stride_token + row % GROUP * q_stride_head)[:, None] + dims[None, :],
            mask=live,
            other=0.0,
        )
        first_position = length - count + first_token
        # Rows beyond the run repeat the last token's position.
        positions = first_position + tl.minimum(token, num_tokens - 1)
        end_token = tl.maximum(first_position + num_tokens, 0)
        end_tile = tl.cdiv(end_token, TILE)
        k_ptr += head * stride_head
        v_ptr += head * stride_head
        table_ptr += tl.cast(seq, tl.int64) * table_stride
        if K_SCALES > 0:
            scale *= tl.load(k_scale_ptr + (head if K_SCALES == 2 else 0))
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        first_masked = 0
        if WINDOW > 0:
            first_masked = tl.maximum(first_position - WINDOW + 1, 0) // TILE
        else:
            first_masked = tl.maximum(first_position + 1, 0) // TILE
            acc, m, total = attend_causal(
                acc, m, total, q, k_ptr, v_ptr, table_ptr, positions, 0, first_masked, end_token, stride_block,
                stride_slot, scale,
                False, BLOCK_SIZE, TILE, HEAD_DIM, SOFT_CAP, WINDOW, FP8, STAGES,
            )  # fmt: skip
        acc, m, total = attend_causal(
            acc, m, total, q, k_ptr, v_ptr, table_ptr, positions, first_masked, end_tile, end_token, stride_block,
            stride_slot, scale,
            True, BLOCK_SIZE, TILE, HEAD_DIM, SOFT_CAP, WINDOW, FP8, STAGES,
        )  # fmt: skip
        out_ptr += (begin * tl.num_programs(0) + head) * GROUP * HEAD_DIM
        offsets = (token * tl.num_programs(0) * GROUP + row % GROUP) * HEAD_DIM
        o = acc / tl.where(total > 0, total, 1.0)[:, None]  # a query that sees nothing gets zeros
        if V_SCALES > 0:
            o *= tl.load(v_scale_ptr + (head if V_SCALES == 2 else 0))
        tl.store(out_ptr + offsets[:, None] + dims[None, :], o.to(out_ptr.dtype.element_ty), mask=live)
