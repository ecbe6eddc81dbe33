"""y = norm(x + residual) W^T for one token or a few, on the multiply-add units.

A step of one token reads every weight once and does two operations with it, so its time is the time to read: what counts
is that reads are wide, that many are in flight, and that none waits for what it need not. A program therefore asks for all
of its weights first and only then waits for the kernel before it (programmatic dependent launch), whose result is its
input. It lets the kernel after it start at once, which does the same. So the weights of the next kernels stream into
registers while this one still computes; how many depends on how few registers it uses for anything but weights.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.math import activation, rounded, to_dtype


@triton.jit
def load_tiles(ptr, row, num_rows, col, SIZE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rows `row` [ROWS, 1] of a contiguous [num_rows, SIZE] matrix as a tuple of [ROWS, BLOCK] tiles, zero outside."""
    line = ptr + row.to(tl.int64) * SIZE
    tiles = ()
    for start in tl.static_range(0, SIZE, BLOCK):
        if EVEN and start + BLOCK <= SIZE:
            tiles = tiles + (tl.load(line + (start + col)),)
        else:
            tiles = tiles + (tl.load(line + (start + col), (row < num_rows) & (start + col < SIZE), other=0.0),)
    return tiles


@triton.jit
def vector_kernel(
    x,  # [TOKENS, SIZE], rows x_stride apart
    residual,  # [TOKENS, SIZE], rows residual_stride apart, if ADD
    norm_weight,  # [SIZE], if NORM
    weight,  # [num_rows, SIZE]; if GATED [2 * num_rows, SIZE], the rows of the gate, then those of the up projection
    bias,  # [num_rows], if BIAS
    y,  # [TOKENS, num_rows]
    new_residual,  # [TOKENS, SIZE], if ADD
    num_rows,
    x_stride,
    residual_stride,
    eps,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of the weight, a program; half of them gate, half up, if GATED
    BLOCK: tl.constexpr,  # columns of a tile: 16 bytes a lane, so that the warps lie side by side along a row
    LANE: tl.constexpr,  # elements in 16 bytes
    EVEN: tl.constexpr,  # whether every program has all its rows
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    r = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    last = num_rows
    if GATED:
        row = tl.program_id(0) * OUTPUTS + r % OUTPUTS
        # A row beyond the gate's end is outside for the mask as well, not the up projection's first.
        row = tl.where(row < num_rows, row + tl.where(r < OUTPUTS, 0, num_rows), 2 * num_rows)
        last = 2 * num_rows
    else:
        row = tl.program_id(0) * ROWS + r
    tiles = load_tiles(weight, row, last, col, SIZE, BLOCK, EVEN)
    one = tl.zeros([1, 1], tl.int32)
    if NORM:
        norm_tiles = load_tiles(norm_weight, one, 1, col, SIZE, BLOCK, True)
    if PDL:
        gdc_wait()  # what was loaded so far never changes; everything below depends on earlier kernels
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    for token in tl.static_range(TOKENS):
        loaded = load_tiles(x + token * x_stride, one, 1, col, SIZE, BLOCK, True)
        if ADD:
            others = load_tiles(residual + token * residual_stride, one, 1, col, SIZE, BLOCK, True)
        values = ()
        squares = tl.zeros([1, BLOCK], tl.float32)
        for i in tl.static_range(len(loaded)):
            v = loaded[i].to(tl.float32)
            if ADD:
                v = rounded(v + others[i].to(tl.float32), dtype)
                if tl.program_id(0) == 0:
                    column = i * BLOCK + col
                    tl.store(new_residual + token * SIZE + column, to_dtype(v, dtype), column < SIZE)
            if NORM:
                squares += v * v
            values = values + (v,)
        inputs = values
        if NORM:
            scale = tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)[:, None]
            inputs = ()
            for i in tl.static_range(len(values)):
                v = rounded(values[i] * scale, dtype) * norm_tiles[i].to(tl.float32)
                inputs = inputs + (rounded(v, dtype),)
        sums = tl.zeros([ROWS, BLOCK // LANE], tl.float32)
        for i in tl.static_range(len(inputs)):
            # What a lane has of a row is added in the lane, and the lanes only once.
            product = tiles[i].to(tl.float32) * inputs[i]
            sums += tl.sum(tl.reshape(product, [ROWS, BLOCK // LANE, LANE]), 2)
        result = tl.sum(sums, 1)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUTPUTS]), [1, 0]))
            activated = activation(rounded(gate, dtype), "silu", dtype)
            result = rounded(activated, dtype) * rounded(up, dtype)
        elif BIAS:
            result += tl.load(bias + out, out < num_rows, other=0.0).to(tl.float32)
        tl.store(y + token * num_rows + out, to_dtype(result, dtype), out < num_rows)
