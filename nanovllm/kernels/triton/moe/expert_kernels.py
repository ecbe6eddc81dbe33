"""The products of experts: for few (token, expert) pairs, and for blocks of pairs that have one expert."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.device_math import gated_product, to_dtype
from nanovllm.kernels.triton.gemm.packed_decode import decode_fp8, fp8_to_float32, split_columns
from nanovllm.kernels.triton.gemm.packed_kernels import load_words
from nanovllm.kernels.triton.gemm.tiles import dot, multiply_tile, weight_rows

# ---------------------------------------------------------------------------------------------------------- few pairs


@triton.jit
def numbers(tile, scale):
    """Weights in float32; with scales they are e4m3, as int8, and without their scales."""
    if scale is None:
        return tile.to(tl.float32)
    else:
        return fp8_to_float32(tile.to(tl.int32))


@triton.jit
def load_scales(scale, row, column, live, stride, SIZE: tl.constexpr):
    """The scales of elements of a weight with SIZE columns: one for each block of 128 x 128."""
    return tl.load(scale + (row // 128 * stride + column // 128), live & (column < SIZE), other=0.0)


@triton.jit
def load_lines(line, live, col, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of SIZE columns, which start at `line`, as a tuple of tiles of BLOCK columns; zero unless `live`."""
    tiles = ()
    for start in tl.static_range(0, SIZE, BLOCK):
        if start + BLOCK <= SIZE:
            tiles = tiles + (tl.load(line + (start + col), live, other=0.0),)
        else:
            tiles = tiles + (tl.load(line + (start + col), live & (start + col < SIZE), other=0.0),)
    return tiles


@triton.jit
def pair_gate_up_kernel(
    x,  # [tokens, SIZE], rows `stride_x` apart
    weight,  # [num_experts, 2 * num_rows, SIZE], gate then up
    scale,  # of `load_scales`; None: the weight is no 8-bit one
    experts,  # [tokens * TOP_K]
    y,  # [tokens * TOP_K, num_rows]
    num_rows, num_experts, stride_x, stride_expert, stride_row, scale_expert, scale_row,
    TOP_K: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of the gate, and of the up projection
    BLOCK: tl.constexpr, LANE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [pieces of num_rows, pairs]: y = silu(gate x) * up x. All weights of a program are on their way at once."""
    dtype: tl.constexpr = y.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + pair + tl.zeros([1, 1], tl.int32))
    r = tl.arange(0, 2 * ROWS)[:, None]
    unit = tl.program_id(0) * ROWS + r % ROWS
    live = (unit < num_rows) & (expert >= 0) & (expert < num_experts)
    row = unit + r // ROWS * num_rows
    line = weight + expert.to(tl.int64) * stride_expert + row.to(tl.int64) * stride_row
    lane = tl.arange(0, BLOCK // LANE)[None, :] * LANE
    col = tl.arange(0, BLOCK)[None, :]
    tiles = load_lines(line, live, col, SIZE, BLOCK)
    x += pair // TOP_K * stride_x
    sums = tl.zeros([2 * ROWS, BLOCK // LANE], tl.float32)
    for i in tl.static_range(len(tiles)):
        at = i * BLOCK + col
        # A lane adds its elements of a row; the lanes are added once, at the end.
        product = numbers(tiles[i], scale) * tl.load(x + at, at < SIZE, other=0.0).to(tl.float32)
        of_lanes = tl.sum(tl.reshape(product, [2 * ROWS, BLOCK // LANE, LANE]), 2)
        if scale is not None:
            of_lanes *= load_scales(scale + expert * scale_expert, row, i * BLOCK + lane, live, scale_row, SIZE)
        sums += of_lanes
    gate, up = tl.split(tl.permute(tl.reshape(tl.sum(sums, 1), [2, ROWS]), [1, 0]))
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(y + pair * num_rows + out, to_dtype(gated_product(gate, up, "silu", dtype), dtype), out < num_rows)


@triton.jit
def pair_down_kernel(
    x,  # [tokens, TOP_K, SIZE]
    weight,  # [num_experts, num_rows, SIZE]
    scale,  # as in `pair_gate_up_kernel`
    weights,  # [tokens, TOP_K] float32
    experts,  # [tokens, TOP_K]
    y,  # [tokens, num_rows]
    num_rows, num_experts, stride_expert, stride_row, scale_expert, scale_row,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LANE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [pieces of num_rows, tokens]: the weighted sum of a token's experts, in one order. SLOTS: a power of two."""
    dtype: tl.constexpr = y.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    expert = tl.load(experts + token * TOP_K + slot, slot < TOP_K, other=-1)
    exists = (expert >= 0) & (expert < num_experts)
    share = tl.load(weights + token * TOP_K + slot, exists, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, None, :]
    line = weight + (
        (expert.to(tl.int64) * stride_expert)[:, None, None] + (row.to(tl.int64) * stride_row)[None, :, None]
    )
    live = exists[:, None, None] & (row < num_rows)[None, :, None]
    tiles = load_lines(line, live, col, SIZE, BLOCK)
    x += (token * TOP_K + slot[:, None, None]) * SIZE
    sums = tl.zeros([SLOTS, ROWS, BLOCK // LANE], tl.float32)
    for i in tl.static_range(len(tiles)):
        at = i * BLOCK + col
        v = tl.load(x + at, exists[:, None, None] & (at < SIZE), other=0.0)
        product = numbers(tiles[i], scale) * v.to(tl.float32)
        of_lanes = tl.sum(tl.reshape(product, [SLOTS, ROWS, BLOCK // LANE, LANE]), 3)
        if scale is not None:
            of_expert = scale + (expert * scale_expert)[:, None, None]
            at = i * BLOCK + tl.arange(0, BLOCK // LANE)[None, None, :] * LANE
            of_lanes *= load_scales(of_expert, row[None, :, None], at, live, scale_row, SIZE)
        sums += of_lanes
    total = tl.sum(tl.sum(sums, 2) * share[:, None], 0)
    tl.store(y + token * num_rows + row, to_dtype(total, dtype), row < num_rows)


# ------------------------------------------------------------------------------------------------------ blocks of pairs


@triton.jit
def pairs_of_block(order, blocks, max_blocks, TOKENS: tl.constexpr):
    """(places in `order`, which of them the program's block has, their pairs): [TOKENS] each; of `SortedPairs`."""
    block = tl.program_id(1)
    place = tl.load(blocks + max_blocks + block) + tl.arange(0, TOKENS)
    live = place < tl.load(blocks + 2 * max_blocks + block)
    return place, live, tl.load(order + place, live, other=0)


@triton.jit
def store_block(acc, y, line, live, first, num_rows, GATED: tl.constexpr, dtype: tl.constexpr):
    """Store sums [rows of the weight, tokens] in lines of y, from output `first` on. GATED: silu(gate) * up of them."""
    acc = tl.trans(acc)
    UNITS: tl.constexpr = acc.shape[1] // 2 if GATED else acc.shape[1]
    col = first + tl.arange(0, UNITS)
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [acc.shape[0], UNITS, 2]))
        acc = gated_product(gate, up, "silu", dtype)
    target = y + line.to(tl.int64)[:, None] * num_rows + col[None, :]
    tl.store(target, to_dtype(acc, dtype), live[:, None] & (col < num_rows)[None, :])


# Not specialised on the number of blocks: that would compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["max_blocks"])
def block_kernel(
    x,  # rows `stride_x` apart: GATED: [tokens, size]; else [pairs, size] in the order of `order`
    weight,  # [num_experts, num_rows (GATED: 2 * num_rows), size]
    order, blocks, max_blocks,  # `SortedPairs`
    y,  # [pairs, num_rows]: GATED: in the order of `order`; else by pair
    num_rows, size, stride_x, stride_expert, stride_row,
    TOP_K: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [pieces of num_rows, blocks]: y = x W^T with the weight of the block's expert; GATED: silu(gate) * up.

    The weight is the left operand, and the pairs of a block are the columns of the right one: a tensor core takes as
    few as 8 of these.
    """
    dtype: tl.constexpr = y.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(blocks + tl.program_id(1))
    if expert < 0:
        return
    place, live, pair = pairs_of_block(order, blocks, max_blocks, TOKENS)
    UNITS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = tl.program_id(0) * UNITS
    row, row_live = weight_rows(first, num_rows, ROWS, GATED)
    w_rows = weight + (expert.to(tl.int64) * stride_expert + row.to(tl.int64) * stride_row)
    x_rows = x + (pair // TOP_K if GATED else place).to(tl.int64) * stride_x
    acc = multiply_tile(
        w_rows, row_live, x_rows, live, 0, size, 1, 1, BLOCK_K, MASK_ROWS, True, MASK_K, STAGES, PRECISION
    )
    store_block(acc, y, place if GATED else pair, live, first, num_rows, GATED, dtype)


@triton.jit(do_not_specialize=["max_blocks"])
def fp8_block_kernel(
    x,  # rows of int32 words of two numbers, `stride_x` words apart; as in `block_kernel`
    weight,  # int16 words of two e4m3 [num_experts, num_rows (GATED: 2 * num_rows), words]
    scale,  # float32 [num_experts, ...], one for each block of 128 x 128
    order, blocks, max_blocks, y, num_rows, words, stride_x, stride_expert, stride_row, scale_expert, scale_row,
    DTYPE: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `block_kernel`. A tile has the 128 columns of one block, whose sum is multiplied by the scale."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(blocks + tl.program_id(1))
    if expert < 0:
        return
    place, live, pair = pairs_of_block(order, blocks, max_blocks, TOKENS)
    UNITS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = tl.program_id(0) * UNITS
    row, row_live = weight_rows(first, num_rows, ROWS, GATED)
    w_rows = weight + (expert.to(tl.int64) * stride_expert + row.to(tl.int64) * stride_row)[:, None]
    x_rows = x + ((pair // TOP_K if GATED else place).to(tl.int64) * stride_x)[None, :]
    s_row = scale + (expert * scale_expert + row // 128 * scale_row)
    cols = tl.arange(0, 64)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, words, 64, num_stages=STAGES):
        k = start + cols
        w, xs = load_words(w_rows, x_rows, row_live, live, k, words, MASK_K)
        s = tl.load(s_row + start // 64, row_live, other=0.0)
        w_tiles = decode_fp8(w, DTYPE)
        x_tiles = split_columns(xs, 2, DTYPE)
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(2):
            part = dot(w_tiles[i], x_tiles[i], part, "ieee")
        acc += part * s[:, None]
    store_block(acc, y, place if GATED else pair, live, first, num_rows, GATED, DTYPE)


@triton.jit
def sum_kernel(
    x,  # [tokens, TOP_K, size]
    weights,  # [tokens, TOP_K] float32
    y,  # [tokens, size]
    size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [pieces of size, tokens]: the weighted sum of each token's experts, in the order of its choices."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        v = tl.load(x + (token * TOP_K + j) * size + col, col < size, other=0.0)
        total += v.to(tl.float32) * tl.load(weights + token * TOP_K + j)
    tl.store(y + token * size + col, to_dtype(total, y.dtype.element_ty), col < size)
