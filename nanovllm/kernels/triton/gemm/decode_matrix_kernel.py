"""y = norm(x + residual) W^T for 2 to 16 tokens, on the tensor cores.

As in `vector_kernel.py` a program asks for all of its weights before it waits for the kernel before it. Here they go on to
shared memory, still before the wait. The weights are the first operand, whose 16 rows a tensor-core instruction fills; the
tokens are its columns, so 8 of them cost no padding. The columns of a row are dealt out to the warps (the batch dimension
of the product), each of which sums its own; the sums are added at the end, in a fixed order.

A token's norm multiplies its inputs, or, with LATE, its sums: then no product waits for the sum of squares, and no input is
held until it is known, so that more tokens fit. An input times the norm's weight is rounded once instead of twice; float16
could overflow there.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.math import INTERPRETED, activation, rounded, to_dtype

if INTERPRETED:
    # The interpreter multiplies the bits of bfloat16 numbers; their products are exact in float32.
    @triton.jit
    def product(a, b, sums):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
else:

    @triton.jit
    def product(a, b, sums):
        """[parts, rows, depth] x [parts, depth, tokens] + sums."""
        return tl.dot(a, b, sums)


@triton.jit
def matrix_kernel(
    x,  # [num_tokens, SIZE], rows x_stride apart
    residual,  # [num_tokens, SIZE], rows residual_stride apart, if ADD
    norm_weight,  # [SIZE], if NORM
    weight,  # [num_rows, SIZE]; if GATED [2 * num_rows, SIZE], the rows of the gate, then those of the up projection
    bias,  # [num_rows], if BIAS
    y,  # [num_tokens, num_rows]
    new_residual,  # [num_tokens, SIZE], if ADD
    num_tokens,
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
    SPLIT: tl.constexpr,  # parts that a block of columns has, one a warp
    DEPTH: tl.constexpr,  # columns of a part
    EVEN: tl.constexpr,  # whether every program has all its rows
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    BLOCK: tl.constexpr = SPLIT * DEPTH
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if PDL:
        gdc_launch_dependents()
    r = tl.arange(0, ROWS)[None, :, None]
    col = tl.arange(0, SPLIT)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    last = num_rows
    if GATED:
        row = tl.program_id(0) * OUTPUTS + r % OUTPUTS
        row = tl.where(row < num_rows, row + tl.where(r < OUTPUTS, 0, num_rows), 2 * num_rows)
        last = 2 * num_rows
    else:
        row = tl.program_id(0) * ROWS + r
    line = weight + row.to(tl.int64) * SIZE
    tiles = ()
    for start in tl.static_range(0, SIZE, BLOCK):
        if EVEN and start + BLOCK <= SIZE:
            tiles = tiles + (tl.load(line + (start + col)),)
        else:
            tiles = tiles + (tl.load(line + (start + col), (row < last) & (start + col < SIZE), other=0.0),)
    column = tl.arange(0, SPLIT)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, :, None]
    if NORM:
        norm_tiles = ()
        for start in tl.static_range(0, SIZE, BLOCK):
            norm_tiles = norm_tiles + (tl.load(norm_weight + (start + column), start + column < SIZE, other=0.0),)
    if PDL:
        gdc_wait()  # what was loaded so far never changes; everything below depends on earlier kernels
    token = tl.arange(0, TOKENS)[None, None, :]
    values = ()
    squares = tl.zeros([SPLIT, DEPTH, TOKENS], tl.float32)
    sums = tl.zeros([SPLIT, ROWS, TOKENS], tl.float32)
    for i in tl.static_range(len(tiles)):
        at = i * BLOCK + column
        inside = (token < num_tokens) & (at < SIZE)
        v = tl.load(x + token * x_stride + at, inside, other=0.0)
        if ADD:
            other = tl.load(residual + token * residual_stride + at, inside, other=0.0)
            v = to_dtype(v.to(tl.float32) + other.to(tl.float32), dtype)
            if tl.program_id(0) == 0:
                tl.store(new_residual + token * SIZE + at, v, inside)
        if NORM:
            squares += v.to(tl.float32) * v.to(tl.float32)
        if LATE:
            if NORM:
                v = to_dtype(v.to(tl.float32) * norm_tiles[i].to(tl.float32), dtype)
            sums = product(tiles[i], v, sums)
        else:
            values = values + (v,)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / SIZE + eps)
    for i in tl.static_range(len(values)):
        v = values[i]
        if NORM:
            v = rounded(v.to(tl.float32) * scale[None, None, :], dtype) * norm_tiles[i].to(tl.float32)
            v = to_dtype(v, dtype)
        sums = product(tiles[i], v, sums)
    result = tl.sum(sums, 0)
    if LATE and NORM:
        result *= scale[None, :]
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUTPUTS, TOKENS]), [1, 2, 0]))
        activated = activation(rounded(gate, dtype), "silu", dtype)
        result = rounded(activated, dtype) * rounded(up, dtype)
    elif BIAS:
        result += tl.load(bias + out, out < num_rows, other=0.0).to(tl.float32)
    token = tl.arange(0, TOKENS)[None, :]
    tl.store(y + token * num_rows + out, to_dtype(result, dtype), (token < num_tokens) & (out < num_rows))
