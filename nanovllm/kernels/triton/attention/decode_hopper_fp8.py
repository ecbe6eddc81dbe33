"""A float8_e4m3fn cache in the decode kernel for Hopper: keys, values and queries as float16 operands, and the new
token's bytes.

Products are float16: it holds every float8, and weights are at most 1. The copy engine and `ldmatrix` move words of two
elements.

A thread has pairs of words where it would have pairs of 16-bit elements. Of a key, that is four dims: two operands of
two dims each, with dims in another order, on which a sum does not depend as long as the queries have them in the same.
Of transposed values it is a word of one key and the same of the next: an operand of their even dims and one of the odd
ones, which so come apart in the output.

Two elements are converted by an instruction that the assembler starts every second cycle, as any integer operation;
shifts and masks, as in `attend.py`, are seven for four.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def float16_keys(words):
    """Words of keys [WARPS, 16, n] -> two first operands [WARPS, 16, n] float16, whose dims are those of
    `float16_queries`.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def float16_values(words, live):
    """Words of transposed values [WARPS, n, 16] -> first operand [WARPS, 2 n, 16] float16: the even dims, then the odd
    ones.

    live [WARPS, 16]: the others become 0, whatever they hold.
    """
    # Of the four bytes of a key pair's words, those of even dims come first; byte 4 is a zero. Each key's column has
    # its two nibbles of the selector.
    column = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, live.type.layout)), 0)
    selector = gl.where(column % 2 == 0, gl.where(live, 0x0100, 0x0404), gl.where(live, 0x3020, 0x4040)).to(gl.int16)
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        .reg .b16 low, high;
        shr.u32 both, $3, 16;
        or.b32 both, both, $3;
        prmt.b32 both, $2, 0, both;
        mov.b32 {low, high}, both;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r,r", [words, gl.expand_dims(selector, 1)], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    both = gl.reshape(gl.permute(gl.join(even, odd), [0, 3, 1, 2]), [words.shape[0], 2 * words.shape[1], 16])
    return gl.convert_layout(both, words.type.layout, assert_trivial=True)


@gluon.jit
def dims_in_order(acc):
    """An output of `float16_values` [WARPS, HEAD_DIM, 8] with its dims as they are in memory."""
    pairs = gl.reshape(acc, [acc.shape[0], 2, acc.shape[1] // 2, 8])
    return gl.reshape(gl.permute(pairs, [0, 2, 1, 3]), acc.shape)


@gluon.jit
def _split(x, WARPS: gl.constexpr):
    """x [8, n] -> two [8, n / 2]: of each four elements the first two and the last two."""
    n: gl.constexpr = x.shape[1]
    fours: gl.constexpr = gl.BlockedLayout([1, 4], [128 // n, n // 4], [WARPS, 1], [1, 0])
    x = gl.reshape(gl.convert_layout(x, fours), [8, n // 4, 2, 2])
    first, second = gl.split(gl.permute(x, [0, 1, 3, 2]))
    return gl.reshape(first, [8, n // 2]), gl.reshape(second, [8, n // 2])


@gluon.jit
def _side_by_side(x, y):
    """x, y [8, n] -> [8, 2 n]"""
    return gl.reshape(gl.permute(gl.join(x, y), [0, 2, 1]), [8, 2 * x.shape[1]])


@gluon.jit
def float16_queries(low, high, WARPS: gl.constexpr):
    """Both halves of the queries [8, HEAD_DIM / 2] -> (those of each product with `float16_keys` [8, HEAD_DIM / 2]
    float16, factor [8]).

    bfloat16 has a wider range than float16: each row is divided by `factor`, a power of two of its largest element's
    size.
    """
    low = low.to(gl.float32)
    high = high.to(gl.float32)
    exponent = gl.max(gl.maximum(gl.abs(low), gl.abs(high)), 1).to(gl.int32, bitcast=True) & 0x7F800000
    # From 2^-126, so that its reciprocal exists, to 2^126, so that the same holds for its reciprocal.
    exponent = gl.minimum(gl.maximum(exponent, 0x00800000), 0x7E800000)
    reciprocal = (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
    low_first, low_second = _split((low * reciprocal).to(gl.float16), WARPS)
    high_first, high_second = _split((high * reciprocal).to(gl.float16), WARPS)
    first = _side_by_side(low_first, high_first)
    return first, _side_by_side(low_second, high_second), exponent.to(gl.float32, bitcast=True)


@gluon.jit
def scale_of_head(scale_ptr, head, SCALES: gl.constexpr):
    """SCALES: 0 none, 1 one, 2 one a head. They are a model's constants: no kernel before this one writes them."""
    if SCALES == 0:
        return 1.0
    elif SCALES == 1:
        return gl.load(scale_ptr)
    else:
        return gl.load(scale_ptr + head)


@gluon.jit
def quantised(x, scale, SCALES: gl.constexpr):
    """x / scale as the cache has it: to nearest, ties to even, beyond +-448 the largest. NaN becomes 0x7f, also a
    negative one.
    """
    x = x.to(gl.float32)
    if SCALES > 0:
        x = gl.div_rn(x, gl.full(x.shape, 1.0, gl.float32, x.type.layout) * scale)
    return x.to(gl.float8e4nv)
