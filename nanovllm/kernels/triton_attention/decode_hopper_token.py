"""The new token and the queries of the decode kernel for Hopper: norm, rotation, and the token's way into the cache."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from nanovllm.kernels.triton_attention.decode_hopper_tiles import finite
from nanovllm.kernels.triton_attention.rotate import rotated_pair
from nanovllm.kernels.triton_ops._math import rounded


@gluon.jit
def acquire():
    """The copy engine reads, from now on, what others have signalled."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _release_stores():
    """Lets the next kernel start: what the first warp has written comes, for every multiprocessor and its copy engine, before that.

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
    """Let the next kernel start. If this program has `stored` the new token: it may be one like this, and read it before it waits."""
    if NEW:
        if stored:
            _release_stores()
        else:
            gdc_launch_dependents()
    else:
        gdc_launch_dependents()


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


@gluon.jit
def attend_token(score, v, acc, m, total):
    """A result and one more token -> the result with it. score [8], -inf for none; v [8, HEAD_DIM] float32."""
    new_m = gl.maximum(m, score)
    base = finite(new_m)
    alpha = gl.exp2(m - base)
    p = gl.exp2(score - base)
    return acc * alpha[:, None] + p[:, None] * v, new_m, total * alpha + p
