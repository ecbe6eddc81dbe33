"""Between the QKV projection and attention: head norms, rotation, and the new token's way into the cache, as parts
of a kernel.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import product, rounded, to_dtype


@triton.jit
def load_heads(
    heads,  # [ROWS, 1] pointers
    weight_ptr,  # [HEAD_DIM], if NORM
    angles,  # a token's row of cos and sin, or [ROWS, 1] of them
    live,  # [ROWS, 1]
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """What `rotate_heads` computes from, in the dtypes of memory, zero where not `live`: heads of tokens anywhere.

    An element's partner in the other half is loaded rather than exchanged between threads, and weights and angles once
    a row rather than moved to the threads that need them: they are in the first-level cache, and no thread waits for
    another.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, DIM_PAD)[None, :]
    dims += 0 * live.to(tl.int32)
    low = dims < HALF
    partners = tl.where(low, dims + HALF, dims - HALF)
    angle = tl.where(low, dims, dims - HALF)
    mask = live & (dims < HEAD_DIM)
    x = tl.load(heads + dims, mask=mask, other=0.0)
    partner = tl.load(heads + partners, mask=mask, other=0.0)
    cos = tl.load(angles + angle, mask=mask, other=0.0)
    sin = tl.load(angles + HALF + angle, mask=mask, other=0.0)
    weight = x
    partner_weight = x
    if NORM:
        weight = tl.load(weight_ptr + dims, mask=mask, other=0.0)
        partner_weight = tl.load(weight_ptr + partners, mask=mask, other=0.0)
    return x, partner, cos, sin, weight, partner_weight


@triton.jit
def rotate_heads(loaded, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads, normalised and rotated, in their dtype: [ROWS, DIM_PAD]. Rounded wherever `rms_norm` and
    `rotary_embedding` round.
    """
    x, partner, cos, sin, weight, partner_weight = loaded
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    partner = partner.to(tl.float32)
    if NORM:
        # Selected, so that no product is fused with the addition of another lane's (see `merge_partials`).
        squares = tl.where(x == x, x * x, x)
        factor = tl.rsqrt(tl.sum(squares, 1) / HEAD_DIM + eps)[:, None]
        x = rounded(rounded(x * factor, dtype) * weight.to(tl.float32), dtype)
        partner = rounded(rounded(partner * factor, dtype) * partner_weight.to(tl.float32), dtype)
    cos = rounded(cos.to(tl.float32), dtype)
    sin = rounded(sin.to(tl.float32), dtype)
    sin = tl.where(tl.arange(0, x.shape[1])[None, :] < HEAD_DIM // 2, -sin, sin)
    return to_dtype(rounded(product(x, cos), dtype) + rounded(product(partner, sin), dtype), dtype)


@triton.jit
def rotated_pair(x1, x2, cos, sin, dtype: tl.constexpr):
    """(lower, upper) halves of heads, of a shape and float32 like cos and sin -> both rotated, in `dtype`.

    Also called from Gluon.
    """
    low = rounded(product(x1, cos), dtype) - rounded(product(x2, sin), dtype)
    high = rounded(product(x2, cos), dtype) + rounded(product(x1, sin), dtype)
    return to_dtype(low, dtype), to_dtype(high, dtype)


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
    """What `rotate_heads` makes of `load_heads`, in half the registers: a large tile's halves are loaded once each,
    and joined in the end.
    """
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
    low, high = rotated_pair(x1, x2, cos, sin, dtype)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [heads.shape[0], HEAD_DIM])


@triton.jit
def store_new_token(
    k,  # [1, DIM_PAD], one KV head, as the cache is to have it: `quantised`
    v,
    k_cache_ptr,
    v_cache_ptr,
    block,
    token,
    live,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
):
    """To the head's slot of a token in a block, if `live`. A float8 cache comes as words of two elements (see
    `attend`), and its strides count them."""
    slot = block.to(tl.int64) * stride_block + token % BLOCK_SIZE * stride_slot
    k_cache_ptr += slot
    v_cache_ptr += slot
    if FP8:
        k_cache_ptr = k_cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        v_cache_ptr = v_cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    dims = tl.arange(0, k.shape[1])[None, :]
    mask = dims < tl.where(live, HEAD_DIM, 0)
    tl.store(k_cache_ptr + dims, k, mask=mask)
    tl.store(v_cache_ptr + dims, v, mask=mask)


@triton.jit
def cached_value(x, FP8: tl.constexpr):
    """What attention reads of a cache's elements, as float32; without the cache's scale."""
    if FP8:
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return x.to(tl.float32)
