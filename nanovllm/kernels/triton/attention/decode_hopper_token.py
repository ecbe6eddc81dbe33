"""The new token and the queries of the decode kernel for Hopper: norm, rotation, and the token's way into the cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from nanovllm.kernels.triton.attention.attend import soft_cap_scores
from nanovllm.kernels.triton.attention.decode_hopper_fp8 import quantised
from nanovllm.kernels.triton.attention.rotate import rotated_pair
from nanovllm.kernels.triton.device_math import product, rounded


@gluon.jit
def acquire():
    """The copy engine reads, from now on, what others have signalled."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _release_stores():
    """Lets the next kernel start: what the first warp has written comes, for every multiprocessor and its copy engine,
    before that.

    The other warps neither wait nor signal: one signal is a program's.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 first, thread, 32;
        @first fence.proxy.async.global;
        @first fence.acq_rel.gpu;
        @first bar.warp.sync 0xffffffff;
        @first griddepcontrol.launch_dependents;
        mov.b32 $0, $1;
        }""",
        "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release(stored, NEW: gl.constexpr):
    """Let the next kernel start.

    If this program has `stored` the new token: it may be one like this, and read it before it waits.
    """
    if NEW:
        if stored:
            _release_stores()
        else:
            gdc_launch_dependents()
    else:
        gdc_launch_dependents()


@gluon.constexpr_function
def half_layout(head_dim, warps):
    """The layout of [8, head_dim / 2], half of the dims of a row for each of eight queries: 16 lanes a row."""
    return gl.BlockedLayout([1, head_dim // 32], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def whole_layout(head_dim, warps):
    """The same of all dims [8, head_dim]."""
    return gl.BlockedLayout([1, head_dim // 16], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def rows_and_dims(dims: gl.constexpr, layout: gl.constexpr):
    """-> (rows [8, 1], dims [1, dims])"""
    return gl.arange(0, 8, layout=gl.SliceLayout(1, layout))[:, None], gl.arange(
        0, dims, layout=gl.SliceLayout(0, layout)
    )[None, :]


@gluon.jit
def load_halves(ptr, stride, COUNT: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """COUNT rows of HEAD_DIM elements, `stride` apart, and zeros up to eight -> both halves of their dims [8,
    HEAD_DIM / 2].
    """
    HALF: gl.constexpr = HEAD_DIM // 2
    rows, dims = rows_and_dims(HALF, half_layout(HEAD_DIM, WARPS))
    ptr += rows * stride + dims
    live = gl.broadcast(rows < COUNT, dims >= 0)[0]
    return gl.load(ptr, mask=live, other=0.0), gl.load(ptr + HALF, mask=live, other=0.0)


@gluon.jit
def load_pair(ptr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """[HEAD_DIM] -> both halves, as columns of `half_layout`."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dims = gl.arange(0, HALF, layout=gl.SliceLayout(0, half_layout(HEAD_DIM, WARPS)))
    return gl.load(ptr + dims), gl.load(ptr + HALF + dims)


@gluon.jit
def load_values(ptr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """[HEAD_DIM] -> [8, HEAD_DIM], in each row."""
    rows, dims = rows_and_dims(HEAD_DIM, whole_layout(HEAD_DIM, WARPS))
    return gl.load(ptr + rows * 0 + dims)


@gluon.jit
def store_token(
    k_ptr, v_ptr, k_low, k_high, v, k_scale, v_scale, mine, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr,
    FP8: gl.constexpr,
    K_SCALES: gl.constexpr, V_SCALES: gl.constexpr,
):  # fmt: skip
    """The new token to its place in the caches, if it is this program's -> (its key's halves, its value) as the
    cache has them.
    """
    HALF: gl.constexpr = HEAD_DIM // 2
    if FP8:
        k_low = quantised(k_low, k_scale, K_SCALES)
        k_high = quantised(k_high, k_scale, K_SCALES)
        v = quantised(v, v_scale, V_SCALES)
    rows, dims = rows_and_dims(HALF, half_layout(HEAD_DIM, WARPS))
    stores = gl.broadcast((rows == 0) & mine, dims >= 0)[0]
    at = rows * 0 + dims
    gl.store(k_ptr + at, k_low, mask=stores)
    gl.store(k_ptr + HALF + at, k_high, mask=stores)
    rows, dims = rows_and_dims(HEAD_DIM, whole_layout(HEAD_DIM, WARPS))
    gl.store(v_ptr + rows * 0 + dims, v, mask=gl.broadcast((rows == 0) & mine, dims >= 0)[0])
    return k_low, k_high, v


@gluon.jit
def score_token(
    q_low, q_high, k_low, k_high, scale, mine, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, SOFT_CAP: gl.constexpr
):
    """The new token's scores [8], -inf if it is another program's."""
    scores = product(q_low.to(gl.float32), k_low.to(gl.float32))
    scores += product(q_high.to(gl.float32), k_high.to(gl.float32))
    score = gl.sum(scores, 1) * scale
    if SOFT_CAP > 0:
        score = soft_cap_scores(score, SOFT_CAP)
    score = gl.where(mine, score, float("-inf"))
    return gl.convert_layout(score, gl.SliceLayout(1, whole_layout(HEAD_DIM, WARPS)), assert_trivial=True)


@gluon.jit
def rotated(low, high, low_weight, high_weight, cos, sin, eps, HEAD_DIM: gl.constexpr, NORM: gl.constexpr):
    """Heads [8, HEAD_DIM / 2] twice, normalised and rotated, rounded wherever `rotate_heads` rounds."""
    dtype: gl.constexpr = low.dtype
    x1 = low.to(gl.float32)
    x2 = high.to(gl.float32)
    if NORM:
        # Selected, so that no product is fused with the addition of another lane's (see `merge_partials`).
        squares = gl.where(x1 == x1, x1 * x1 + x2 * x2, x1)
        factor = gl.rsqrt(gl.sum(squares, 1) / HEAD_DIM + eps)[:, None]
        x1 = rounded(rounded(x1 * factor, dtype) * low_weight.to(gl.float32)[None, :], dtype)
        x2 = rounded(rounded(x2 * factor, dtype) * high_weight.to(gl.float32)[None, :], dtype)
    cos, _ = gl.broadcast(rounded(cos.to(gl.float32), dtype)[None, :], x1)
    sin, _ = gl.broadcast(rounded(sin.to(gl.float32), dtype)[None, :], x1)
    return rotated_pair(x1, x2, cos, sin, dtype)
