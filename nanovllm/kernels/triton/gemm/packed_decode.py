"""Packed weights as numbers of 16 bits, which tensor cores multiply.

A weight is read as words of 16 bits: two 8-bit or four 4-bit weights of adjacent columns, the lowest bits first.
Decoding gives a tile for each place in a word: tile i has the columns i, i + PER, i + 2 PER, ... Products take the
columns of x in the same order. With two words in a register, weights in the same place of both are 16 bits apart, as
two numbers of 16 bits in a register are. So a shift and a mask move both into place.

To make a number of an integer, its bits replace the last bits of the mantissa of a power of two, of which a multiple is
then taken away: exact, and two numbers an instruction. bfloat16 has room for 7 bits: 128 + q. float16 has room for
10: 1024 + q.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import INTERPRETED, to_dtype

# (bfloat16, float16), two of them in a register
_ONE = ("0x3f803f80", "0x3c003c00")


def _assembly(body: str, dtype: int) -> tl.constexpr:
    """A block of PTX. $0, $1, ...: the tiles of the result, then the words, then the function's other operands."""
    body = body.replace("FMA", ("fma.rn.bf16x2", "fma.rn.f16x2")[dtype])
    return tl.constexpr("{ .reg .b32 t, u, m, one; mov.b32 one, " + _ONE[dtype] + ";\n" + body + "}")


def _nibbles(dtype: int, finish: str) -> tl.constexpr:
    magic = ("0x43004300", "0x64006400")[dtype]
    body = f"mov.b32 m, {magic};\n"
    for i in range(4):
        body += f"shr.b32 t, $4, {4 * i};\n" if i else "mov.b32 t, $4;\n"
        # HIGH: bits 4 and 5, which lie in bits 0, 2, 8 and 10 of $8.
        high = f"sh{'rl'[i < 2]}.b32 t, $8, {(4, 2, 4, 6)[i]};\nlop3.b32 ${i}, t, 0x00300030, ${i}, 0xea;"
        body += f"lop3.b32 ${i}, t, 0x000f000f, m, 0xea;\n" + finish.replace("HIGH", high).replace("$i", f"${i}")
    return _assembly(body, dtype)


def _bytes(dtype: int, finish: str) -> tl.constexpr:
    body = ""
    for i in range(2):
        body += f"shr.b32 t, $2, {8 * i};\n"
        if dtype:
            body += f"mov.b32 m, 0x64006400;\nlop3.b32 ${i}, t, 0x00ff00ff, m, 0xea;\n"
        else:
            # 128 + the low 7 bits, minus 128 if the high bit is set, else 256: that bit is the last of the exponent.
            body += f"mov.b32 m, 0x43004300;\nlop3.b32 ${i}, t, 0x007f007f, m, 0xea;\n"
            body += "mov.b32 m, 0x43804380;\nlop3.b32 t, t, 0x00800080, m, 0x6a;\n"
            body += f"mov.b32 u, 0xbf80bf80;\nFMA ${i}, t, u, ${i};\n"
        body += finish.replace("$i", f"${i}")
    return _assembly(body, dtype)


def _floats(dtype: int) -> tl.constexpr:
    # Exponent and mantissa move into place. The exponent's bias is then too small by 120 or 8.
    shift, mask, factor = ((4, "0x07f007f0", "0x7b807b80"), (1, "0x3f803f80", "0x5c005c00"))[dtype]
    body = f"mov.b32 u, {factor};\n"
    for i in range(2):
        body += "shl.b32 m, $2, 8;\n" if i == 0 else "mov.b32 m, $2;\n"
        body += f"shr.b32 t, m, {shift};\nand.b32 t, t, {mask};\n"
        body += f"lop3.b32 t, m, 0x80008000, t, 0xea;\nmov.b32 m, 0x80008000;\nFMA ${i}, t, u, m;\n"
    return _assembly(body, dtype)


# One for bfloat16, one for float16. Operands behind the words: what is added to the magic number plus q, then, of the
# scaled ones, scale and minimum.
_NIBBLES_BF16, _NIBBLES_FP16 = (_nibbles(i, "FMA $i, $i, one, $5;\n") for i in range(2))
_BYTES_BF16, _BYTES_FP16 = (_bytes(i, "FMA $i, $i, one, $3;\n") for i in range(2))
_SCALED_NIBBLES = _nibbles(0, "FMA $i, $i, one, $5;\nFMA $i, $i, $6, $7;\n")
_SCALED_SIX = _nibbles(0, "HIGH\nFMA $i, $i, one, $5;\nFMA $i, $i, $6, $7;\n")
_SCALED_BYTES = _bytes(0, "FMA $i, $i, one, $3;\nFMA $i, $i, $4, $5;\n")
_FLOATS_BF16, _FLOATS_FP16 = (_floats(i) for i in range(2))


@triton.jit
def integer(words, i: tl.constexpr, BITS: tl.constexpr):
    """The weight in place i of words of 16 bits, as an integer of 32 bits."""
    return (words.to(tl.int32) >> (i * BITS)) & (2**BITS - 1)


@triton.jit
def high_bits(high, i: tl.constexpr):
    """16 times bits 4 and 5 of the weight in place i, of the plane qh: in bits 0, 2, 8 and 10 of int16 `high`."""
    return ((high.to(tl.int32) >> (i % 2 * 2 + i // 2 * 8) & 3) * 16).to(tl.float32)


@triton.jit
def fp8_to_float32(code):
    """float8_e4m3fn in the low bits of an int32, as float32; of the codes of NaN +-480."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def offset_of(zero, BITS: tl.constexpr, dtype: tl.constexpr):
    """What `decode_int` and `decode_scaled` take, for zero points of BITS bits (int32), by their bits."""
    if dtype == tl.float16:
        return (zero | 0xE400).to(tl.int16).to(dtype, bitcast=True)  # -1024 - zero
    elif BITS == 4:
        return (zero | 0xC300).to(tl.int16).to(dtype, bitcast=True)  # -128 - zero
    else:
        return (8388736.0 - (zero | 0x4B000000).to(tl.float32, bitcast=True)).to(dtype)  # 128 - zero


if INTERPRETED:

    @triton.jit
    def _magic(BITS: tl.constexpr, dtype: tl.constexpr):
        return 1024.0 if dtype == tl.float16 else (128.0 if BITS == 4 else -128.0)

    @triton.jit
    def _number(words, i: tl.constexpr, offset, BITS: tl.constexpr, dtype: tl.constexpr):
        return integer(words, i, BITS).to(tl.float32) + (_magic(BITS, dtype) + offset.to(tl.float32))

    @triton.jit
    def decode_fp8(words, dtype: tl.constexpr):
        low = fp8_to_float32(integer(words, 0, 8))
        return to_dtype(low, dtype), to_dtype(fp8_to_float32(integer(words, 1, 8)), dtype)

    @triton.jit
    def decode_int(words, offset, BITS: tl.constexpr, dtype: tl.constexpr):
        tiles = ()
        for i in tl.static_range(16 // BITS):
            tiles = tiles + (to_dtype(_number(words, i, offset, BITS, dtype), dtype),)
        return tiles

    @triton.jit
    def decode_scaled(words, high, offset, scale, minimum, BITS: tl.constexpr, dtype: tl.constexpr):
        tiles = ()
        for i in tl.static_range(16 // BITS):
            q = _number(words, i, offset, BITS, dtype)
            if high is not None:
                q += high_bits(high, i)
            tiles = tiles + (to_dtype(q * scale.to(tl.float32) + minimum.to(tl.float32), dtype),)
        return tiles
else:
    # Of the types of results in a tuple Triton takes no parameters of a function: each type has a call of its own.

    @triton.jit
    def decode_fp8(words, dtype: tl.constexpr):
        """int16 words of float8_e4m3fn -> two tiles of `dtype`, exact; of the codes of NaN +-480."""
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _FLOATS_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                _FLOATS_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )

    @triton.jit
    def decode_int(words, offset, BITS: tl.constexpr, dtype: tl.constexpr):
        """int16 words -> a tile of q - zero for each place, exact; offset: `offset_of(zero)`, like words."""
        if BITS == 4 and dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _NIBBLES_BF16, "=&r,=&r,=&r,=&r,r,r", [words, offset],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        elif BITS == 4:
            return tl.inline_asm_elementwise(
                _NIBBLES_FP16, "=&r,=&r,=&r,=&r,r,r", [words, offset],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        elif dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _BYTES_BF16, "=&r,=&r,r,r", [words, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                _BYTES_FP16, "=&r,=&r,r,r", [words, offset], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )

    @triton.jit
    def decode_scaled(words, high, offset, scale, minimum, BITS: tl.constexpr, dtype: tl.constexpr):
        """int16 words -> a tile of (q - zero) * scale + minimum for each place. All operands are like words.

        In bfloat16 scale and minimum are bfloat16, and the result is rounded once. In float16 they are float32, since
        small scales are subnormal there.
        """
        if dtype == tl.float16:
            tiles = ()
            integers = decode_int(words, offset, BITS, dtype)
            for i in tl.static_range(len(integers)):
                q = integers[i].to(tl.float32)
                if high is not None:
                    q += high_bits(high, i)
                tiles = tiles + ((q * scale + minimum).to(dtype),)
            return tiles
        elif high is not None:
            return tl.inline_asm_elementwise(
                _SCALED_SIX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, offset, scale, minimum, high],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        elif BITS == 4:
            return tl.inline_asm_elementwise(
                _SCALED_NIBBLES, "=&r,=&r,=&r,=&r,r,r,r,r", [words, offset, scale, minimum],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _SCALED_BYTES, "=&r,=&r,r,r,r,r", [words, offset, scale, minimum],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip


@triton.jit
def split_columns(words, PER: tl.constexpr, dtype: tl.constexpr):
    """Words of PER adjacent 16-bit numbers -> a tile for each place."""
    tiles = ()
    for i in tl.static_range(PER):
        tiles = tiles + ((words >> (16 * i)).to(tl.int16).to(dtype, bitcast=True),)
    return tiles
