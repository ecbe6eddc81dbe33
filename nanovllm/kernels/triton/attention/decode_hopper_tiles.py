"""Tiles of keys and values of the decode kernel for Hopper: how they come into shared memory, and what a tile adds to a
result.

A tile has 16 keys for each warp of the program. A warp has a running maximum, a sum and an output of its own over its
keys, so no warp waits for another within a tile; `merge_warps` merges them once, at the end. Scores are keys x queries,
16 x 8 an instruction, and the output is dims x queries: no row of an instruction is idle with up to eight queries, and
the queries are few registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nanovllm.kernels.triton.attention.attend import finite, soft_cap_scores
from nanovllm.kernels.triton.attention.decode_hopper_fp8 import float16_values
from nanovllm.kernels.triton.gluon_compat import reinterpret, tma_load


@gluon.constexpr_function
def tile_view(warps, words, box):
    """A tile in shared memory as [warps, 16 keys, words of 16 bits].

    It is boxes of `box` keys one after the other, a box is columns of 64 words, and a column's rows are lines of 128
    bytes, whose 16-byte pieces are permuted by the line's number (mod 8): eight keys' pieces of the same dims lie in
    different banks. Where a key has 32 words, two keys are a line.
    """
    line = min(words, 64)
    bases = [[0, 0, 1 << i] for i in range(line.bit_length() - 1)]
    rows = [[row // 16, row % 16, 0] for row in (1 << i for i in range((warps * 16).bit_length() - 1))]
    in_box = box.bit_length() - 1
    keys_a_line = 64 // line
    bases += [
        [warp, row, (8 << i) // keys_a_line if 1 << i >= keys_a_line else 0]
        for i, (warp, row, _) in enumerate(rows[:3])
    ]
    bases += rows[3:in_box]
    bases += [[0, 0, line << i] for i in range((words // line).bit_length() - 1)]
    bases += rows[in_box:]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.jit
def transposed(x):
    """Pairs of 16-bit elements in a thread, rows of 8 x 8 matrices: what a warp's threads hold of the transposed
    matrices.
    """
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def kept(x, mask):
    """x where the int16 mask is -1, and +0 where it is 0, whatever x holds there; two elements an instruction."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def request_tile(
    descriptors, k_tile, v_tile, full, block, tile, head, end_token, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Ask for a tile, at once if all of its tokens come before end_token, else for its boxes that have such tokens.

    The other boxes are asked for where the cache has none: the copy engine fills them with zeros and reads nothing. So
    `full` always waits for as many bytes, and what is read beyond the last token is less than a box.
    """
    BOXES: gl.constexpr = TILE // BOX
    k_whole, v_whole, k_part, v_part = descriptors
    first = tile * TILE
    box = (block * BLOCK_SIZE + first % BLOCK_SIZE) // BOX
    LINE: gl.constexpr = k_tile.shape[1]
    mbarrier.expect(full, 2 * k_tile.shape[0] * LINE * 2)
    whole = first + (TILE - BOX) < end_token
    if whole:
        tma_load(
            k_whole, [box, 0, 0, head, 0], full, reinterpret(k_tile, k_tile.dtype, k_whole.block_shape, k_whole.layout)
        )
        tma_load(
            v_whole, [box, 0, 0, head, 0], full, reinterpret(v_tile, v_tile.dtype, v_whole.block_shape, v_whole.layout)
        )
    elif BOXES > 1:
        k_boxes = reinterpret(k_tile, k_tile.dtype, [BOXES, k_tile.shape[0] // BOXES, LINE], k_tile.layout)
        v_boxes = reinterpret(v_tile, v_tile.dtype, [BOXES, v_tile.shape[0] // BOXES, LINE], v_tile.layout)
        for i in gl.static_range(BOXES):
            at = [gl.where(first + i * BOX < end_token, box + i, -1), 0, 0, head, 0]
            tma_load(k_part, at, full, reinterpret(k_boxes.index(i), k_tile.dtype, k_part.block_shape, k_part.layout))
            tma_load(v_part, at, full, reinterpret(v_boxes.index(i), v_tile.dtype, v_part.block_shape, v_part.layout))


@gluon.jit
def _in_window(tokens, first_token, end_token, WINDOW: gl.constexpr):
    live = tokens < end_token
    if WINDOW > 0:
        live = live & (tokens >= first_token)
    return live


@gluon.jit
def attend_tile(
    q_low, q_high, k_low, k_high, v, first, first_token, end_token, scale, acc, m, total, mma: gl.constexpr,
    WARPS: gl.constexpr, FP8: gl.constexpr, SOFT_CAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A tile, in registers, and a result (acc, m, total) -> the result with it.

    Args:
        q_low, q_high: [WARPS, HEAD_DIM / 2, 8], each half of the dims; k_low, k_high: [WARPS, 16, HEAD_DIM / 2]; v:
            [WARPS, HEAD_DIM, 16].
            FP8: the operands of `decode_hopper_fp8`, and v as words, [WARPS, HEAD_DIM / 2, 16].
        first: the tile's first token. What tokens from end_token on have may be anything, also NaN.
        first_token: with WINDOW, tokens before this one are not attended to.
        scale: of the scores, one or [1, 1, 8].
        acc: [WARPS, HEAD_DIM, 8]; m: [WARPS, 8]; total: [WARPS, 16, 8], each key's part of the sum, added up in the
            end.
    """
    zeros = gl.zeros([WARPS, 16, 8], gl.float32, mma)
    # Two chains: the products of one wait for each other.
    scores = (mma_v2(k_low, q_low, zeros) + mma_v2(k_high, q_high, zeros)) * scale
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1)
    row = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0)
    if SOFT_CAP > 0:
        scores = soft_cap_scores(scores, SOFT_CAP)
    live = _in_window(first + warp * 16 + row, first_token, end_token, WINDOW)
    scores = gl.where(gl.expand_dims(live, 2), scores, float("-inf"))
    new_m = gl.maximum(m, gl.max(scores, 1))
    base = finite(new_m)
    p = gl.exp2(scores - base[:, None, :])
    alpha = gl.exp2(m - base)[:, None, :]
    total = total * alpha + p
    # A thread has pairs of queries of a key, and is to have pairs of keys of a query.
    weights = transposed(p.to(q_low.dtype))
    weights = gl.reshape(gl.permute(gl.reshape(weights, [WARPS, 2, 8, 8]), [0, 1, 3, 2]), [WARPS, 16, 8])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)
    # Weights of dead tokens are 0, but 0 * NaN is NaN.
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, operand))), 1)
    column = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, operand))), 0)
    live = _in_window(first + warp * 16 + column, first_token, end_token, WINDOW)
    if FP8:
        v = float16_values(v, live)
    else:
        v = kept(v, gl.expand_dims(gl.where(live, -1, 0).to(gl.int16), 1))
    acc = mma_v2(v, weights, acc * alpha)
    return acc, new_m, total
