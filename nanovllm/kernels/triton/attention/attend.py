"""The walk of the decode kernels over KV tiles: queries of one KV head against a range of cached tokens.

Softmax runs in base 2: scores are multiplied by scale * log2(e), so that exp2, one instruction, replaces exp. A result
is (acc, m, total): the sum of p @ v with p = exp2(score - m), the running maximum m, and the sum of p.

A float8_e4m3fn cache comes as int16, two elements a word. The 7 lower bits of an element, moved to the exponent and
mantissa of a float16, are its value / 256, subnormals included, so that three integer operations convert two elements
and no instruction of newer GPUs is needed. (NaN, which `store_kvcache` writes for NaN alone, would read as 480.) Even
and odd elements of a head stay apart: q k is the sum of two products, and p v is two of them, interleaved in the end.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import INTERPRETED, product


@triton.jit
def soft_cap_scores(scores, SOFT_CAP: tl.constexpr):
    """scores * log2(e) -> SOFT_CAP * tanh(scores / SOFT_CAP) * log2(e). tanh(x) = 1 - 2 / (1 + e^2x)."""
    return (SOFT_CAP * 1.4426950408889634) * (1 - 2 / (1 + tl.exp2(scores * (2 / SOFT_CAP))))


if INTERPRETED:

    @triton.jit
    def fp8_pair(words):
        bits = words.to(tl.uint16, bitcast=True)
        low = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        high = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
else:

    @triton.jit
    def fp8_pair(words):
        """int16 words of two float8 -> (their low ones, their high ones) / 256 as float16; two words at a time."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $2, 8;
            and.b32 a, a, 0xff00ff00;
            shr.b32 b, a, 1;
            and.b32 b, b, 0x3f803f80;
            lop3.b32 $0, a, 0x80008000, b, 0xea;
            shr.b32 b, $2, 1;
            and.b32 b, b, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, b, 0xea;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def fp8_queries(q):
    """q [ROWS, DIM] -> (even elements, odd elements, factor [ROWS]) in what the products with `fp8_pair` take.

    bfloat16 has a wider range than float16: each row is divided by a power of two of its largest element's size.
    """
    if q.dtype == tl.float32:
        factor = tl.full([q.shape[0]], 1.0, tl.float32)
        halves = q
    else:
        wide = q.to(tl.float32)
        exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
        # From 2^-126, so that its reciprocal exists, to 2^126, so that the same holds for its reciprocal.
        exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
        factor = exponent.to(tl.float32, bitcast=True)
        halves = (wide * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
    even, odd = tl.split(tl.reshape(halves, [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd, factor


@triton.jit
def load_tile(
    k_ptr, v_ptr, table_ptr, block, tile, first_token, end_token, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, FP8: tl.constexpr, WHOLE: tl.constexpr,
    FRESH: tl.constexpr = False,
):  # fmt: skip
    """A tile's keys and values, and which of its tokens are in [first_token, end_token): k, v [TILE, words], live
    [TILE].

    `block` is the tile's, unless tiles straddle blocks. WHOLE: all tokens are live. FRESH: past the first-level cache.
    """
    CACHE: tl.constexpr = ".cg" if FRESH else ""
    WORDS: tl.constexpr = DIM_PAD // 2 if FP8 else DIM_PAD
    WORDS_USED: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    offs_t = tl.arange(0, TILE)
    offs_w = tl.arange(0, WORDS)
    tokens = tile * TILE + offs_t
    live = (tokens >= first_token) & (tokens < end_token)
    if BLOCK_SIZE % TILE == 0:
        base = block.to(tl.int64) * stride_block + (tile * TILE % BLOCK_SIZE) * stride_slot
        offsets = (offs_t * stride_slot)[:, None] + offs_w[None, :]
        k_tile = (k_ptr + base) + offsets
        v_tile = (v_ptr + base) + offsets
    else:
        blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=live, other=0, cache_modifier=CACHE).to(tl.int64)
        rows = (blocks * stride_block + tokens % BLOCK_SIZE * stride_slot)[:, None] + offs_w[None, :]
        k_tile = k_ptr + rows
        v_tile = v_ptr + rows
    # Dead slots may hold NaN, and 0 * NaN is NaN: they are not read.
    if WHOLE and WORDS == WORDS_USED:
        k = tl.load(k_tile, cache_modifier=CACHE)
        v = tl.load(v_tile, cache_modifier=CACHE)
    else:
        mask = live[:, None] if WORDS == WORDS_USED else live[:, None] & (offs_w < WORDS_USED)[None, :]
        k = tl.load(k_tile, mask=mask, other=0, cache_modifier=CACHE)
        v = tl.load(v_tile, mask=mask, other=0, cache_modifier=CACHE)
    return k, v, live


@triton.jit
def finite(m):
    """A maximum to subtract: 0 where nothing was found, since inf - inf is no number. Also called from Gluon."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def next_weights(scores, live, m, total, SOFT_CAP: tl.constexpr, WHOLE: tl.constexpr, EMPTY: tl.constexpr):
    """A step of the running softmax -> (weights p, the factor for what was summed so far, maximum, sum of p).

    live: [TILE], the same for all rows, or [ROWS, TILE].
    """
    if SOFT_CAP > 0:
        scores = soft_cap_scores(scores, SOFT_CAP)
    if not WHOLE:
        if len(live.shape) == 1:
            live = live[None, :]
        scores = tl.where(live, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = finite(new_m) if EMPTY else new_m
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha[:, None], new_m, total * alpha + tl.sum(p, 1)


@triton.jit
def attend_tile(
    q, scale, k, v, live, acc, m, total, SOFT_CAP: tl.constexpr, WHOLE: tl.constexpr, EMPTY: tl.constexpr = False
):
    """EMPTY: the tile may have no live token, or none for a row."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    p, alpha, m, total = next_weights(scores, live, m, total, SOFT_CAP, WHOLE, EMPTY)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha, input_precision="ieee")
    return acc, m, total


@triton.jit
def attend_fp8_tile(
    q_even, q_odd, scale, k, v, live, acc, acc_odd, m, total, SOFT_CAP: tl.constexpr, WHOLE: tl.constexpr,
    EMPTY: tl.constexpr = False,
):  # fmt: skip
    k_even, k_odd = fp8_pair(tl.trans(k))
    scores = tl.dot(q_even, k_even.to(q_even.dtype), input_precision="ieee")
    scores = tl.dot(q_odd, k_odd.to(q_odd.dtype), scores, input_precision="ieee") * scale
    p, alpha, m, total = next_weights(scores, live, m, total, SOFT_CAP, WHOLE, EMPTY)
    v_even, v_odd = fp8_pair(v)
    p = p.to(q_even.dtype)
    acc = tl.dot(p, v_even.to(p.dtype), acc * alpha, input_precision="ieee")
    acc_odd = tl.dot(p, v_odd.to(p.dtype), acc_odd * alpha, input_precision="ieee")
    return acc, acc_odd, m, total


@triton.jit
def seen(tile, row_ends, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Which tokens of a tile each row sees, all before its end, or the last WINDOW of them: [ROWS, TILE]."""
    tokens = (tile * TILE + tl.arange(0, TILE))[None, :]
    live = tokens < row_ends[:, None]
    if WINDOW > 0:
        live = live & (tokens >= row_ends[:, None] - WINDOW)
    return live


@triton.jit
def attend(
    q,  # [ROWS, DIM_PAD]
    k_ptr,
    v_ptr,
    table_ptr,
    first_tile,
    end_tile,
    first_token,
    end_token,
    stride_block,
    stride_slot,
    scale,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    start=None,
    loaded=None,
    WHOLE: tl.constexpr = False,
    EMPTY: tl.constexpr = False,
    row_ends=None,
    WINDOW: tl.constexpr = 0,
):
    """q against the tokens [first_token, end_token) that lie in the tiles [first_tile, end_tile).

    Strides count elements of k_ptr, which for FP8 are words of two. Without tiles the result is (0, -inf, 0), or
    `start`, a result to go on from. `loaded`: another tile, from `load_tile`, that comes before these and may have no
    such token.
    WHOLE: every token of the tiles is one. EMPTY: a tile may have none. `row_ends` [ROWS]: of these tokens a row
    attends to those before its own end, with WINDOW to the last WINDOW of them, and to none of what is `loaded`.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIM_PAD: tl.constexpr = q.shape[1]
    WORDS: tl.constexpr = DIM_PAD // 2 if FP8 else DIM_PAD
    if start is None:
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WORDS], tl.float32)
        if FP8:
            acc_odd = tl.zeros([ROWS, WORDS], tl.float32)
    else:
        acc, m, total = start
        if FP8:
            acc, acc_odd = tl.split(tl.reshape(acc * (1 / 256), [ROWS, WORDS, 2]))
    if FP8:
        q_even, q_odd, factor = fp8_queries(q)
        scale = (factor * (scale * 256.0))[:, None]
    elif q.dtype != k_ptr.dtype.element_ty:
        q = q.to(tl.float32)
    if loaded is not None:
        k, v, live = loaded
        if FP8:
            acc, acc_odd, m, total = attend_fp8_tile(
                q_even, q_odd, scale, k, v, live, acc, acc_odd, m, total, SOFT_CAP, WHOLE, True
            )
        else:
            acc, m, total = attend_tile(q, scale, k, v, live, acc, m, total, SOFT_CAP, WHOLE, True)
    # Read a tile ahead: the address of a tile's first load would otherwise wait for the table.
    block = tl.load(table_ptr + first_tile * TILE // BLOCK_SIZE)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        k, v, live = load_tile(
            k_ptr, v_ptr, table_ptr, block, tile, first_token, end_token, stride_block, stride_slot, BLOCK_SIZE, TILE,
            HEAD_DIM, DIM_PAD, FP8, WHOLE,
        )  # fmt: skip
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table_ptr + tl.minimum(tile + 1, end_tile - 1) * TILE // BLOCK_SIZE)
        if row_ends is not None:
            live = seen(tile, row_ends, TILE, WINDOW)
        if FP8:
            acc, acc_odd, m, total = attend_fp8_tile(
                q_even, q_odd, scale, k, v, live, acc, acc_odd, m, total, SOFT_CAP, WHOLE, EMPTY
            )
        else:
            acc, m, total = attend_tile(q, scale, k, v, live, acc, m, total, SOFT_CAP, WHOLE, EMPTY)
    if FP8:
        acc = tl.interleave(acc, acc_odd) * 256.0
    return acc, m, total


@triton.jit
def token_score(q, k, scale, SOFT_CAP: tl.constexpr):
    """The scores [n] of one token. q [n, DIM_PAD], k [1, DIM_PAD] float32."""
    # Not contracted into the sum, or the lanes that hold a row's score would not all hold the same (see
    # `merge_partials`).
    score = tl.sum(product(q.to(tl.float32), tl.broadcast_to(k, q.shape)), 1) * scale
    if SOFT_CAP > 0:
        score = soft_cap_scores(score, SOFT_CAP)
    return score


@triton.jit
def attend_token(score, v, acc, m, total):
    """A result and one more token -> the result with it. score [ROWS], -inf for none; v [1 or ROWS, DIM_PAD] float32.

    Also called from Gluon.
    """
    new_m = tl.maximum(m, score)
    base = finite(new_m)
    alpha = tl.exp2(m - base)
    p = tl.exp2(score - base)
    return acc * alpha[:, None] + p[:, None] * v, new_m, total * alpha + p
