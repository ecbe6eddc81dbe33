"""Between the QKV projection and attention: head norms, rotation, and the new token's way into the cache, as parts of a kernel."""

import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._math import product, rounded, to_dtype
from nanovllm.kernels.triton_ops.cache import quantised


@triton.jit
def rotated_rows(
    x_ptr,
    stride_head,
    weight_ptr,  # [HEAD_DIM], if NORM
    angles_ptr,  # the token's row of cos and sin
    eps,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """HEADS heads of one token, normalised and rotated, in the dtype of x: [ROWS, DIM_PAD], zero beyond HEADS and HEAD_DIM.

    An element's partner in the other half is loaded rather than exchanged between threads, and weights and angles once a row
    rather than moved to the threads that need them: they are in the first-level cache, and no thread waits for another. Rounded wherever the ops `rms_norm` and `rotary_embedding` round.
    """
    rows = tl.arange(0, ROWS)[:, None]
    heads = x_ptr + rows * stride_head
    return rotated_tile(heads, weight_ptr, angles_ptr, eps, rows < HEADS, HEAD_DIM, DIM_PAD, NORM)


@triton.jit
def rotated_tile(
    heads,  # [ROWS, 1] pointers
    weight_ptr,
    angles,  # a pointer, or [ROWS, 1] of them
    eps,
    live,  # [ROWS, 1]
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """As `rotated_rows`, of heads and tokens anywhere."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = heads.dtype.element_ty
    dims = tl.arange(0, DIM_PAD)[None, :]
    dims += 0 * live.to(tl.int32)
    low = dims < HALF
    partners = tl.where(low, dims + HALF, dims - HALF)
    angle = tl.where(low, dims, dims - HALF)
    mask = live & (dims < HEAD_DIM)
    x = tl.load(heads + dims, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(heads + partners, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        # Selected, so that no product is fused with the addition of another lane's (see `merge_partials`).
        squares = tl.where(x == x, x * x, x)
        factor = tl.rsqrt(tl.sum(squares, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight_ptr + partners, mask=mask, other=0.0).to(tl.float32)
        x = rounded(rounded(x * factor, dtype) * weight, dtype)
        partner = rounded(rounded(partner * factor, dtype) * partner_weight, dtype)
    cos = rounded(tl.load(angles + angle, mask=mask, other=0.0).to(tl.float32), dtype)
    sin = rounded(tl.load(angles + HALF + angle, mask=mask, other=0.0).to(tl.float32), dtype)
    sin = tl.where(low, -sin, sin)
    return to_dtype(rounded(product(x, cos), dtype) + rounded(product(partner, sin), dtype), dtype)


@triton.jit
def rotated_halves(
    heads,  # [ROWS, 1] pointers
    weight_ptr,
    angles,  # [ROWS, 1] pointers
    eps,
    live,  # [ROWS, 1]
    HEAD_DIM: tl.constexpr,  # a power of two
    NORM: tl.constexpr,
):
    """As `rotated_tile`, in half the registers: a large tile's halves are loaded once each, and joined in the end."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = heads.dtype.element_ty
    dims = tl.arange(0, HALF)[None, :]
    x1 = tl.load(heads + dims, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(heads + HALF + dims, mask=live, other=0.0).to(tl.float32)
    cos = rounded(tl.load(angles + dims, mask=live, other=0.0).to(tl.float32), dtype)
    sin = rounded(tl.load(angles + HALF + dims, mask=live, other=0.0).to(tl.float32), dtype)
    if NORM:
        squares = tl.where(x1 == x1, x1 * x1 + x2 * x2, x1)
        factor = tl.rsqrt(tl.sum(squares, 1) / HEAD_DIM + eps)[:, None]
        x1 = rounded(rounded(x1 * factor, dtype) * tl.load(weight_ptr + dims).to(tl.float32), dtype)
        x2 = rounded(rounded(x2 * factor, dtype) * tl.load(weight_ptr + HALF + dims).to(tl.float32), dtype)
    low = to_dtype(rounded(product(x1, cos), dtype) - rounded(product(x2, sin), dtype), dtype)
    high = to_dtype(rounded(product(x2, cos), dtype) + rounded(product(x1, sin), dtype), dtype)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [heads.shape[0], HEAD_DIM])


@triton.jit
def new_token(
    k_ptr,
    v_ptr,
    k_weight_ptr,
    angles_ptr,
    eps,
    k_scale_ptr,
    v_scale_ptr,
    head,
    cache_dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
):
    """One KV head of one token as the cache is to have it: k normalised and rotated, and v: [1, DIM_PAD] each.

    All pointers are to that head. Of a float8 cache they are the bits, as uint8.
    """
    dims = tl.arange(0, DIM_PAD)[None, :]
    k = rotated_rows(k_ptr, 0, k_weight_ptr, angles_ptr, eps, 1, 1, HEAD_DIM, DIM_PAD, NORM)
    v = tl.load(v_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
    k = quantised(k, k_scale_ptr, head, cache_dtype, K_SCALES, FP8)
    v = quantised(v, v_scale_ptr, head, cache_dtype, V_SCALES, FP8)
    return k, v


@triton.jit
def store_new_token(
    k,  # [1, DIM_PAD], from `new_token`
    v,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    token,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
):
    """All pointers are to the head. A float8 cache comes as words of two elements (see `attend`), and its strides count them."""
    block = tl.load(table_ptr + token // BLOCK_SIZE).to(tl.int64)
    slot = block * stride_block + token % BLOCK_SIZE * stride_slot
    k_cache_ptr += slot
    v_cache_ptr += slot
    if FP8:
        k_cache_ptr = k_cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        v_cache_ptr = v_cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    dims = tl.arange(0, k.shape[1])[None, :]
    tl.store(k_cache_ptr + dims, k, mask=dims < HEAD_DIM)
    tl.store(v_cache_ptr + dims, v, mask=dims < HEAD_DIM)


@triton.jit
def cached_value(x, FP8: tl.constexpr):
    """What attention reads of a cache's elements, as float32; without the cache's scale."""
    if FP8:
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return x.to(tl.float32)
