"""y = norm(x + residual) W^T for a few tokens, on the multiply-add units or on the tensor cores.

A step of a few tokens reads every weight once, so its time is the time to read. A program therefore loads all of its
weights first, and only then waits for the kernel before it (programmatic dependent launch). It lets the kernel after it
start at once, which does the same: the weights of the next kernels stream in while this one still computes. The fewer
registers a kernel uses for anything but weights, the more of them are in flight.

Both kernels round as the ops that they fuse.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.device_math import gated_product, rounded, to_dtype
from nanovllm.kernels.triton.gemm.tiles import dot


@triton.jit
def load_tiles(ptr, row, num_rows, col, SIZE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a contiguous [num_rows, SIZE] matrix as a tuple of tiles of BLOCK columns, zero outside of the matrix.

    row and col broadcast to a tile. EVEN: all rows exist.
    """
    line = ptr + row.to(tl.int64) * SIZE
    tiles = ()
    for start in tl.static_range(0, SIZE, BLOCK):
        if EVEN and start + BLOCK <= SIZE:
            tiles = tiles + (tl.load(line + (start + col)),)
        else:
            tiles = tiles + (tl.load(line + (start + col), (row < num_rows) & (start + col < SIZE), other=0.0),)
    return tiles


@triton.jit
def load_weight(
    weight, r, col, num_rows,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The ROWS rows of the weight that this program has, as tiles; r: 0 to ROWS - 1.

    GATED: half of the rows are of the gate, [num_rows, SIZE], half of the up projection that follows it.
    """
    if GATED:
        OUTPUTS: tl.constexpr = ROWS // 2
        row = tl.program_id(0) * OUTPUTS + r % OUTPUTS
        # A row beyond the end of the gate is masked; it is not the first row of the up projection.
        row = tl.where(row < num_rows, row + tl.where(r < OUTPUTS, 0, num_rows), 2 * num_rows)
        return load_tiles(weight, row, 2 * num_rows, col, SIZE, BLOCK, EVEN)
    else:
        return load_tiles(weight, tl.program_id(0) * ROWS + r, num_rows, col, SIZE, BLOCK, EVEN)


@triton.jit
def vector_kernel(
    x,  # [TOKENS, SIZE], rows x_stride apart
    residual,  # [TOKENS, SIZE], rows residual_stride apart, if ADD
    norm_weight,  # [SIZE], if NORM
    weight,  # [num_rows, SIZE]; if GATED [2 * num_rows, SIZE], the rows of the gate, then those of the up projection
    bias,  # [num_rows], if BIAS
    y,  # [TOKENS, num_rows]
    new_residual,  # [TOKENS, SIZE], if ADD
    num_rows, x_stride, residual_stride, eps,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of the weight, a program; half gate, half up, if GATED
    BLOCK: tl.constexpr,  # columns of a tile: 16 bytes a lane
    LANE: tl.constexpr,  # elements in 16 bytes
    EVEN: tl.constexpr,  # every program has all its rows
    PDL: tl.constexpr,
):  # fmt: skip
    """On the multiply-add units, one token after the other."""
    dtype: tl.constexpr = y.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    r = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    tiles = load_weight(weight, r, col, num_rows, SIZE, ROWS, BLOCK, GATED, EVEN)
    one = tl.zeros([1, 1], tl.int32)
    if NORM:
        norm_tiles = load_tiles(norm_weight, one, 1, col, SIZE, BLOCK, True)
    if PDL:
        gdc_wait()  # weights never change; everything below depends on earlier kernels
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
            # A lane adds its elements of a row; the lanes are added once, at the end.
            product = tiles[i].to(tl.float32) * inputs[i]
            sums += tl.sum(tl.reshape(product, [ROWS, BLOCK // LANE, LANE]), 2)
        result = tl.sum(sums, 1)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUTPUTS]), [1, 0]))
            result = gated_product(gate, up, "silu", dtype)
        elif BIAS:
            result += tl.load(bias + out, out < num_rows, other=0.0).to(tl.float32)
        tl.store(y + token * num_rows + out, to_dtype(result, dtype), out < num_rows)


@triton.jit
def matrix_kernel(
    x, residual, norm_weight, weight, bias, y, new_residual, num_tokens, num_rows, x_stride, residual_stride, eps,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr,  # parts of a block of columns, one a warp
    DEPTH: tl.constexpr,  # columns of a part
    EVEN: tl.constexpr,
    LATE: tl.constexpr,  # the norm of a token multiplies its sums, not its inputs
    PDL: tl.constexpr,
):  # fmt: skip
    """As `vector_kernel` for num_tokens tokens, at most TOKENS, on the tensor cores.

    The weights go on to shared memory before the wait. They are the first operand, which has 16 rows in a tensor-core
    instruction. The tokens are its columns, so 8 tokens need no padding. The warps share the columns of a row (the
    batch dimension of the product); their sums are added at the end, in a fixed order.

    With LATE no product waits for the sum of squares, and no input is held until then, so more tokens fit. An input
    times the weight of the norm is rounded once instead of twice; float16 could overflow there.
    """
    dtype: tl.constexpr = y.dtype.element_ty
    BLOCK: tl.constexpr = SPLIT * DEPTH
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if PDL:
        gdc_launch_dependents()
    r = tl.arange(0, ROWS)[None, :, None]
    col = tl.arange(0, SPLIT)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    tiles = load_weight(weight, r, col, num_rows, SIZE, ROWS, BLOCK, GATED, EVEN)
    column = tl.arange(0, SPLIT)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, :, None]
    if NORM:
        norm_tiles = ()
        for start in tl.static_range(0, SIZE, BLOCK):
            norm_tiles = norm_tiles + (tl.load(norm_weight + (start + column), start + column < SIZE, other=0.0),)
    if PDL:
        gdc_wait()  # weights never change; everything below depends on earlier kernels
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
            sums = dot(tiles[i], v, sums, "ieee")
        else:
            values = values + (v,)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / SIZE + eps)
    for i in tl.static_range(len(values)):
        v = values[i]
        if NORM:
            v = rounded(v.to(tl.float32) * scale[None, None, :], dtype) * norm_tiles[i].to(tl.float32)
            v = to_dtype(v, dtype)
        sums = dot(tiles[i], v, sums, "ieee")
    result = tl.sum(sums, 0)
    if LATE and NORM:
        result *= scale[None, :]
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, [2, OUTPUTS, TOKENS]), [1, 2, 0]))
        result = gated_product(gate, up, "silu", dtype)
    elif BIAS:
        result += tl.load(bias + out, out < num_rows, other=0.0).to(tl.float32)
    token = tl.arange(0, TOKENS)[None, :]
    tl.store(y + token * num_rows + out, to_dtype(result, dtype), (token < num_tokens) & (out < num_rows))
