"""y = x W^T for few tokens, with a weight that is decoded on its way to the tensor cores.

The weight is the first operand of the product, which tensor cores take from registers: there words of packed weights
become numbers of 16 bits (`packed_decode`). The second operand is the tokens, padded to a power of two of at least 8.

`group_kernel` is for scales of 128 columns or more: it multiplies integers or 8-bit floats, exactly, and the sum of a
tile's columns by the scale. `part_kernel` is for finer scales: it multiplies scaled weights, rounded to 16 bits.

If the weight has too few rows to keep all multiprocessors reading, programs share the columns (SPLIT). A second kernel
adds their sums in order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.device_math import to_dtype
from nanovllm.kernels.triton.gemm.packed_decode import (
    decode_fp8,
    decode_int,
    decode_scaled,
    offset_of,
    split_columns,
)
from nanovllm.kernels.triton.gemm.tiles import dot


@triton.jit
def store_outputs(acc, bias, y, rows, num_rows, tokens, num_tokens, SPLIT: tl.constexpr):
    """Store sums [rows, tokens] as y [num_tokens, num_rows]; with SPLIT float32, in y[program_id(1)]."""
    live = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    at = tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    if SPLIT:
        at += tl.program_id(1).to(tl.int64) * num_tokens * num_rows
    elif bias is not None:
        acc += tl.load(bias + rows, rows < num_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(y + at, to_dtype(acc, y.dtype.element_ty), live)


@triton.jit
def start_early(weight, rows, row_live, begin, end, stride, WORDS: tl.constexpr):
    """Bring the first WORDS words of rows into the L2 cache, let the next kernel start, wait for the one in front.

    The cache is coherent: if the kernel in front still writes what was fetched, it writes it there.
    """
    gdc_launch_dependents()
    LINES: tl.constexpr = triton.cdiv(WORDS, 64)  # of 128 bytes
    at = tl.minimum(begin + tl.arange(0, triton.next_power_of_2(LINES)) * 64, end - 1)
    pointers = weight + tl.where(row_live, rows, 0).to(tl.int64)[:, None] * stride + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    gdc_wait()


@triton.jit
def load_words(w_rows, x_rows, row_live, token_live, k, end, MASK: tl.constexpr):
    """(weights [rows, words], tokens [words, tokens]) at the words k of rows; zero from `end` on, if MASK."""
    if MASK:
        w = tl.load(w_rows + k[None, :], row_live[:, None] & (k < end)[None, :], other=0)
        xs = tl.load(x_rows + k[:, None], token_live[None, :] & (k < end)[:, None], other=0)
    else:
        w = tl.load(w_rows + k[None, :], row_live[:, None], other=0)
        xs = tl.load(x_rows + k[:, None], token_live[None, :], other=0)
    return w, xs


# Not specialised on the number of tokens: that would compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["num_tokens"])
def group_kernel(
    x,  # [num_tokens, words] int64 or int32: 4 or 2 numbers of 16 bits
    weight,  # [num_rows, words] int16
    scale,  # [rows, columns] of scales
    zero,  # uint8, like scale; None: the middle
    bias,  # [num_rows] or None
    y,  # [num_tokens, num_rows], or if SPLIT [splits, num_tokens, num_rows] float32
    num_tokens, num_rows, words, split_words, x_stride, weight_stride, scale_columns,
    DTYPE: tl.constexpr,  # of x
    FLOATS: tl.constexpr,  # weights are 8-bit floats; else integers of BITS
    BITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # rows of the weight that share a scale
    SCALE_WORDS: tl.constexpr,  # words of a row that share a scale: a multiple of BLOCK, or all
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of ROWS rows, splits of split_words words, blocks of TOKENS]; BLOCK: words of a tile."""
    PER: tl.constexpr = 16 // BITS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, BLOCK)
    row_live = rows < num_rows
    token_live = tokens < num_tokens
    w_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
    x_rows = x + tokens.to(tl.int64)[None, :] * x_stride
    s_at = (rows // SCALE_ROWS).to(tl.int64) * scale_columns
    begin = tl.program_id(1) * split_words
    end = tl.minimum(begin + split_words, words)
    if PDL:
        start_early(weight, rows, row_live, begin, end, weight_stride, BLOCK * (STAGES - 1))
    if zero is None:
        offset = tl.broadcast_to(offset_of(tl.full([ROWS, 1], 2 ** (BITS - 1), tl.int32), BITS, DTYPE), [ROWS, BLOCK])
    # Scales are loaded a tile ahead.
    at = s_at + begin // SCALE_WORDS
    s = tl.load(scale + at, row_live, other=0.0)
    if zero is not None:
        z = tl.load(zero + at, row_live, other=0)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        k = start + cols
        w, xs = load_words(w_rows, x_rows, row_live, token_live, k, end, MASK)
        at = s_at + tl.minimum(start + BLOCK, words - 1) // SCALE_WORDS
        next_s = tl.load(scale + at, row_live, other=0.0)
        if zero is not None:
            next_z = tl.load(zero + at, row_live, other=0)
            offset = tl.broadcast_to(offset_of(z.to(tl.int32), BITS, DTYPE)[:, None], [ROWS, BLOCK])
        if FLOATS:
            w_tiles = decode_fp8(w, DTYPE)
        else:
            w_tiles = decode_int(w, offset, BITS, DTYPE)
        x_tiles = split_columns(xs, PER, DTYPE)
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(PER):
            part = dot(w_tiles[i], x_tiles[i], part, "ieee")
        acc += part * s.to(tl.float32)[:, None]
        s = next_s
        if zero is not None:
            z = next_z
    store_outputs(acc, bias, y, rows, num_rows, tokens, num_tokens, SPLIT)


@triton.jit
def load_parts(plane, rows, row_live, row_stride, first, end, PARTS: tl.constexpr):
    """A number for each of PARTS parts of a row, from part `first` on: [rows, PARTS]."""
    part = first + tl.arange(0, PARTS)
    at = rows.to(tl.int64)[:, None] * row_stride + part[None, :]
    return tl.load(plane + at, row_live[:, None] & (part < end)[None, :], other=0)


@triton.jit
def spread(x, WIDTH: tl.constexpr):
    """[rows, parts] -> [rows, parts * WIDTH], each number WIDTH times."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], WIDTH])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * WIDTH])


@triton.jit(do_not_specialize=["num_tokens"])
def part_kernel(
    x,  # as for group_kernel
    weight,  # [num_rows, words] int16
    d,  # scales, of a part, or with `sc` of a block of BLOCK_PARTS parts
    m,  # minima (GGUF: with `mn` scales of the minima), like d; None: 0
    sc,  # scales of the parts of a block, integers; None: 1
    mn,  # minima of the parts of a block, taken m times; None: 1, and m is added
    zero,  # uint8, of a part; None: ZERO
    high,  # the plane qh of GGUF, int16, rows like those of weight; None: no bits above BITS
    bias, y, num_tokens, num_rows, words, split_words, x_stride, weight_stride,
    d_stride, sc_stride, zero_stride,  # between rows; m's is d_stride, mn's sc_stride
    DTYPE: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr,
    PART_WORDS: tl.constexpr,  # words of a part, a divisor of BLOCK
    BLOCK_PARTS: tl.constexpr,  # one of this and the parts of a tile divides the other
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `group_kernel`, for scales and minima of parts of a few columns."""
    PER: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = BLOCK // PART_WORDS
    D_PARTS: tl.constexpr = PARTS // BLOCK_PARTS if PARTS > BLOCK_PARTS else 1
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, BLOCK)
    row_live = rows < num_rows
    token_live = tokens < num_tokens
    w_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
    x_rows = x + tokens.to(tl.int64)[None, :] * x_stride
    begin = tl.program_id(1) * split_words
    end = tl.minimum(begin + split_words, words)
    EXACT: tl.constexpr = tl.float32 if DTYPE == tl.float16 else DTYPE
    if PDL:
        start_early(weight, rows, row_live, begin, end, weight_stride, BLOCK * (STAGES - 1))
    parts = tl.cdiv(end, PART_WORDS)
    blocks = tl.cdiv(parts, BLOCK_PARTS)
    # What belongs to parts is loaded a tile ahead.
    part = begin // PART_WORDS
    s = load_parts(d, rows, row_live, d_stride, part // BLOCK_PARTS, blocks, D_PARTS)
    if m is not None:
        low = load_parts(m, rows, row_live, d_stride, part // BLOCK_PARTS, blocks, D_PARTS)
    if sc is not None:
        s_factor = load_parts(sc, rows, row_live, sc_stride, part, parts, PARTS)
    if mn is not None:
        low_factor = load_parts(mn, rows, row_live, sc_stride, part, parts, PARTS)
    if zero is not None:
        z = load_parts(zero, rows, row_live, zero_stride, part, parts, PARTS)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        k = start + cols
        w, xs = load_words(w_rows, x_rows, row_live, token_live, k, end, MASK)
        scale = spread(s.to(tl.float32), PARTS // D_PARTS)
        if sc is not None:
            scale = scale * s_factor.to(tl.float32)
        if m is not None:
            minimum = spread(low.to(tl.float32), PARTS // D_PARTS)
            if mn is not None:
                minimum = -minimum * low_factor.to(tl.float32)
        else:
            minimum = tl.zeros([ROWS, PARTS], tl.float32)
        if zero is not None:
            offset = offset_of(z.to(tl.int32), BITS, DTYPE)
        else:
            offset = offset_of(tl.full([ROWS, PARTS], ZERO, tl.int32), BITS, DTYPE)
        part = start // PART_WORDS + PARTS
        s = load_parts(d, rows, row_live, d_stride, part // BLOCK_PARTS, blocks, D_PARTS)
        if m is not None:
            low = load_parts(m, rows, row_live, d_stride, part // BLOCK_PARTS, blocks, D_PARTS)
        if sc is not None:
            s_factor = load_parts(sc, rows, row_live, sc_stride, part, parts, PARTS)
        if mn is not None:
            low_factor = load_parts(mn, rows, row_live, sc_stride, part, parts, PARTS)
        if zero is not None:
            z = load_parts(zero, rows, row_live, zero_stride, part, parts, PARTS)
        if high is not None:  # two for four words: of the first two in the upper halves of bytes
            pair = start // 2 + tl.arange(0, BLOCK // 2)
            at = rows.to(tl.int64)[:, None] * weight_stride + pair[None, :]
            bits = tl.load(high + at, row_live[:, None] & (pair < end // 2)[None, :], other=0)
            bits = tl.reshape(bits, [ROWS, BLOCK // 4, 1, 2])
            bits = tl.reshape(tl.broadcast_to(bits, [ROWS, BLOCK // 4, 2, 2]), [ROWS, BLOCK])
            bits = ((bits >> ((1 - cols // 2 % 2) * 4).to(tl.int16)[None, :]) & 0x0F0F).to(tl.int16)
        else:
            bits = None
        w_tiles = decode_scaled(
            w, bits, spread(offset, PART_WORDS), spread(to_dtype(scale, EXACT), PART_WORDS),
            spread(to_dtype(minimum, EXACT), PART_WORDS), BITS, DTYPE,
        )  # fmt: skip
        x_tiles = split_columns(xs, PER, DTYPE)
        for i in tl.static_range(PER):
            acc = dot(w_tiles[i], x_tiles[i], acc, "ieee")
    store_outputs(acc, bias, y, rows, num_rows, tokens, num_tokens, SPLIT)
