"""The kernels of `rotary`: heads of q and k rotated, with the RMS norm before and the cache store after it.

An element is rotated with its partner in the other half of the head, so a program loads the halves as two tiles. It
loads heads before angles: the address of the angles depends on the token's position, which is loaded too.

STORE: k_out and v_out are caches. k is rotated into the slot of its token, v is copied into it. DEPENDENT: launched
before the kernel before it has ended. The kernel waits, and does not let its successor start: that could read the cache
before the new tokens are stored.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import rounded, to_dtype
from nanovllm.kernels.triton.rows.move_rows import store_quantised


@triton.jit
def _rotated(x1, x2, w1, w2, cos, sin, head_dim, eps, dtype: tl.constexpr, NORM: tl.constexpr):
    """Halves [HEADS, n] of heads, as float32 with the precision of dtype."""
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    if NORM:
        if dtype == tl.float32:
            squares = x1 * x1 + x2 * x2
        else:
            squares = tl.fma(x2, x2, x1 * x1)  # the same bits: a square of 16 bits is exact
        scale = tl.rsqrt(tl.sum(squares, 1) / head_dim + eps)[:, None]
        x1 = rounded(rounded(x1 * scale, dtype) * w1, dtype)
        x2 = rounded(rounded(x2 * scale, dtype) * w2, dtype)
    # Every product is rounded, as in the reference; launched without contraction to FMA for the same reason.
    y1 = rounded(x1 * cos, dtype) - rounded(x2 * sin, dtype)
    y2 = rounded(x2 * cos, dtype) + rounded(x1 * sin, dtype)
    return rounded(y1, dtype), rounded(y2, dtype)


@triton.jit
def _rotated_heads(
    x, weight, table, head, num_heads, head_stride, half_dim, eps,
    dtype: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(halves, halves, mask) of some heads of one token: x points to its heads, table to its angles."""
    col = tl.arange(0, BLOCK)
    in_row = col < half_dim
    mask = (head < num_heads)[:, None] & in_row[None, :]
    source = x + head[:, None] * head_stride + col[None, :]
    x1 = tl.load(source, mask, other=0.0)
    x2 = tl.load(source + half_dim, mask, other=0.0)
    w1 = x1
    w2 = x2
    if NORM:
        w1 = tl.load(weight + col, in_row, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + half_dim + col, in_row, other=0.0).to(tl.float32)[None, :]
    cos = rounded(tl.load(table + col, in_row, other=0.0).to(tl.float32), dtype)[None, :]
    sin = rounded(tl.load(table + half_dim + col, in_row, other=0.0).to(tl.float32), dtype)[None, :]
    y1, y2 = _rotated(x1, x2, w1, w2, cos, sin, 2 * half_dim, eps, dtype, NORM)
    return y1, y2, mask


@triton.jit
def _rotate_heads(
    x, y, weight, table, first_head, num_heads, head_stride, half_dim, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads first_head .. first_head + HEADS - 1 of one token: x and y point to that token's heads."""
    dtype: tl.constexpr = y.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    y1, y2, mask = _rotated_heads(x, weight, table, head, num_heads, head_stride, half_dim, eps, dtype, NORM, BLOCK)
    target = y + head[:, None] * (2 * half_dim) + tl.arange(0, BLOCK)[None, :]
    tl.store(target, to_dtype(y1, dtype), mask)
    tl.store(target + half_dim, to_dtype(y2, dtype), mask)


@triton.jit
def _load_tiles(x, head, head_stride, HALF: tl.constexpr, PIECES: tl.constexpr):
    """The halves of PIECES tiles of heads, as a tuple."""
    tiles = ()
    for i in tl.static_range(PIECES):
        source = x + (i * head.shape[0] + head) * head_stride + tl.arange(0, HALF)[None, :]
        tiles = tiles + ((tl.load(source), tl.load(source + HALF)),)
    return tiles


@triton.jit
def _load_row(source, head, HALF: tl.constexpr, dtype: tl.constexpr):
    """The halves of a row as tiles with a copy for each head: each thread loads its own, and none waits for another."""
    col = tl.broadcast_to(tl.arange(0, HALF)[None, :], [head.shape[0], HALF])
    return rounded(tl.load(source + col).to(tl.float32), dtype), rounded(
        tl.load(source + HALF + col).to(tl.float32), dtype
    )


@triton.jit
def _rotate_tiles(tiles, y, weights, angles, head, eps, HALF: tl.constexpr, PIECES: tl.constexpr, NORM: tl.constexpr):
    dtype: tl.constexpr = y.dtype.element_ty
    for i in tl.static_range(PIECES):
        y1, y2 = _rotated(
            tiles[i][0], tiles[i][1], weights[0], weights[1], angles[0], angles[1], 2 * HALF, eps, dtype, NORM
        )
        target = y + (i * head.shape[0] + head) * (2 * HALF) + tl.arange(0, HALF)[None, :]
        tl.store(target, to_dtype(y1, dtype))
        tl.store(target + HALF, to_dtype(y2, dtype))


@triton.jit
def _store_tile(tile, slot, scale, piece, head, HALF: tl.constexpr, SCALES: tl.constexpr, FP8: tl.constexpr):
    """The halves of tile `piece` of the heads into a cache's slot."""
    known = piece * head.shape[0] + head
    target = slot + known * (2 * HALF) + tl.arange(0, HALF)[None, :]
    store_quantised(target, tile[0], scale, known, None, SCALES, FP8)
    store_quantised(target + HALF, tile[1], scale, known, None, SCALES, FP8)


# Positions and slots are rows of one tensor, whose alignment depends on the number of tokens: not specialised on.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotary_tokens_kernel(
    positions, q, k, v, q_weight, k_weight, cos_sin_cache, q_out, k_out, v_out, slot_mapping, k_scale, v_scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, cache_stride, k_slot_stride,
    v_slot_stride, eps,
    Q_PIECES: tl.constexpr, K_PIECES: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, STORE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All heads of TOKENS tokens a program, in tiles of HEADS, without masks. It starts all loads of a token first."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = q_out.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    for t in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + t
        # Both addresses are loaded at the start: what depends on them waits for one round trip, not for two.
        position = tl.load(positions + token).to(tl.int64)
        if STORE:
            slot = tl.load(slot_mapping + token).to(tl.int64)
            vs = _load_tiles(v + token * v_stride, head, v_head_stride, HALF, K_PIECES)
        qs = _load_tiles(q + token * q_stride, head, q_head_stride, HALF, Q_PIECES)
        ks = _load_tiles(k + token * k_stride, head, k_head_stride, HALF, K_PIECES)
        angles = _load_row(cos_sin_cache + position * cache_stride, head, HALF, dtype)
        q_weights = angles
        k_weights = angles
        if NORM:
            q_weights = _load_row(q_weight, head, HALF, dtype)
            if not STORE:
                k_weights = _load_row(k_weight, head, HALF, dtype)
        if STORE:
            for i in tl.static_range(K_PIECES):  # while the angles are on their way
                _store_tile(vs[i], v_out + slot * v_slot_stride, v_scale, i, head, HALF, V_SCALES, FP8)
        q_target = q_out + token * (Q_PIECES * HEADS * 2 * HALF)
        _rotate_tiles(qs, q_target, q_weights, angles, head, eps, HALF, Q_PIECES, NORM)
        if STORE:
            if NORM:
                # Loaded earlier, these would make other registers spill.
                k_weights = _load_row(k_weight, head, HALF, dtype)
            for i in tl.static_range(K_PIECES):
                rotated = _rotated(
                    ks[i][0], ks[i][1], k_weights[0], k_weights[1], angles[0], angles[1], 2 * HALF, eps, dtype, NORM
                )
                _store_tile(rotated, k_out + slot * k_slot_stride, k_scale, i, head, HALF, K_SCALES, FP8)
        else:
            k_target = k_out + token * (K_PIECES * HEADS * 2 * HALF)
            _rotate_tiles(ks, k_target, k_weights, angles, head, eps, HALF, K_PIECES, NORM)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rotary_kernel(
    positions, q, k, v, q_weight, k_weight, cos_sin_cache, q_out, k_out, v_out, slot_mapping, k_scale, v_scale,
    num_q_heads, num_k_heads, half_dim, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    cache_stride, k_slot_stride, v_slot_stride, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tokens, pieces of HEADS heads]: the heads of q and k, and with STORE those of v."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    dtype: tl.constexpr = q_out.dtype.element_ty
    col = tl.arange(0, BLOCK)
    q_pieces = tl.cdiv(num_q_heads, HEADS)
    k_pieces = tl.cdiv(num_k_heads, HEADS)
    if not STORE or piece < q_pieces + k_pieces:
        table = cos_sin_cache + tl.load(positions + token).to(tl.int64) * cache_stride
        if piece < q_pieces:
            _rotate_heads(
                q + token * q_stride, q_out + token * num_q_heads * (2 * half_dim), q_weight, table, piece * HEADS,
                num_q_heads, q_head_stride, half_dim, eps, NORM, HEADS, BLOCK,
            )  # fmt: skip
        elif not STORE:
            _rotate_heads(
                k + token * k_stride, k_out + token * num_k_heads * (2 * half_dim), k_weight, table,
                (piece - q_pieces) * HEADS, num_k_heads, k_head_stride, half_dim, eps, NORM, HEADS, BLOCK,
            )  # fmt: skip
        else:
            head = (piece - q_pieces) * HEADS + tl.arange(0, HEADS)
            y1, y2, mask = _rotated_heads(
                k + token * k_stride, k_weight, table, head, num_k_heads, k_head_stride, half_dim, eps, dtype, NORM,
                BLOCK
            )  # fmt: skip
            slot = tl.load(slot_mapping + token).to(tl.int64)
            target = k_out + slot * k_slot_stride + head[:, None] * (2 * half_dim) + col[None, :]
            known = tl.minimum(head, num_k_heads - 1)[:, None]
            store_quantised(target, y1, k_scale, known, mask, K_SCALES, FP8)
            store_quantised(target + half_dim, y2, k_scale, known, mask, K_SCALES, FP8)
    else:
        head = (piece - q_pieces - k_pieces) * HEADS + tl.arange(0, HEADS)
        mask = (head < num_k_heads)[:, None] & (col < half_dim)[None, :]
        slot = tl.load(slot_mapping + token).to(tl.int64)
        source = v + token * v_stride + head[:, None] * v_head_stride + col[None, :]
        target = v_out + slot * v_slot_stride + head[:, None] * (2 * half_dim) + col[None, :]
        known = tl.minimum(head, num_k_heads - 1)[:, None]
        store_quantised(target, tl.load(source, mask), v_scale, known, mask, V_SCALES, FP8)
        store_quantised(target + half_dim, tl.load(source + half_dim, mask), v_scale, known, mask, V_SCALES, FP8)
