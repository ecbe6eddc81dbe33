"""Queries and keys of the decode kernel for Hopper as operands of their products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.triton.attention.decode_hopper_fp8 import float16_keys, float16_queries


@gluon.jit
def _query_operand(x, mma: gl.constexpr, WARPS: gl.constexpr):
    """Rows of x [8, n], one a query, as every warp's second operand [WARPS, n, 8]."""
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    x = gl.expand_dims(gl.convert_layout(gl.permute(x, [1, 0]), gl.SliceLayout(0, layout)), 0)
    return gl.broadcast(x, gl.zeros([WARPS, x.shape[1], 8], x.dtype, layout))[0]


@gluon.jit
def query_operands(low, high, scale, mma: gl.constexpr, WARPS: gl.constexpr, FP8: gl.constexpr):
    """Both halves of the queries [8, HEAD_DIM / 2] -> (the second operands of both products, the scale of their
    scores).
    """
    if FP8:
        low, high, factor = float16_queries(low, high, WARPS)
        factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
        scale = (factor * scale)[None, None, :]
    return _query_operand(low, mma, WARPS), _query_operand(high, mma, WARPS), scale


@gluon.jit
def key_operands(k, mma: gl.constexpr, FP8: gl.constexpr):
    """Keys [WARPS, 16, n] -> the first operands of both products; in registers they are that already, but for
    float8's format.
    """
    if FP8:
        return float16_keys(k)
    else:
        layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
        pairs = gl.reshape(k, [k.shape[0], 16, 2, k.shape[2] // 2])
        low, high = gl.split(gl.permute(pairs, [0, 1, 3, 2]))
        low = gl.convert_layout(low, layout, assert_trivial=True)
        return low, gl.convert_layout(high, layout, assert_trivial=True)
