"""What arithmetic, bitwise and conversion instructions of PTX compute: a warp's 32 values at a time, as numpy
arrays.
"""

from __future__ import annotations

from functools import cache

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}
TYPES = {
    "b16": U16, "u16": U16, "s16": np.int16, "b32": U32, "u32": U32, "s32": np.int32, "f32": np.float32, "b64": U64,
    "u64": U64,
    "s64": np.int64, "s8": np.int8, "u8": U8,
}  # fmt: skip


class _Sizes(dict):
    """Bytes of a type of numpy."""

    def __missing__(self, kind):
        self[kind] = np.dtype(kind).itemsize
        return self[kind]


SIZES = _Sizes()


@cache
def constant(number, kind):
    """A number's lowest bits as a register that nobody writes to."""
    size = SIZES[kind]
    register = np.full(32, number & ((1 << 8 * size) - 1), UNSIGNED[size])
    register.flags.writeable = False
    return register.view(kind)


class UnknownInstruction(Exception):
    """PTX that the emulator does not know: a test that meets it says nothing about the kernel."""


def type_of(name):
    return chosen(TYPES, name)


def chosen(table, name):
    if name not in table:
        raise UnknownInstruction(name)
    return table[name]


def _bf16(bits):
    return (bits.astype(U32) << U32(16)).view(np.float32)


def _to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(U32)
    rounded = ((bits.astype(U64) + 0x7FFF + ((bits >> U32(16)) & U32(1))) >> 16).astype(U16)
    return np.where(np.isnan(x), U16(0x7FFF), rounded)


def _f16(bits):
    return bits.astype(U16).view(np.float16).astype(np.float32)


def _e4m3_of(bits):
    """float8_e4m3fn -> float32."""
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size = np.where((bits & 0x7F) == 0x7F, np.nan, size)
    return np.where(bits & 0x80, -size, size).astype(np.float32)


_OF_E4M3 = _e4m3_of(np.arange(256, dtype=np.int32))
_E4M3 = _OF_E4M3[:0x7F].astype(np.float64)  # from 0 to 448, in order


def _e4m3(bits):
    return _OF_E4M3[bits]


def _to_e4m3(x):
    """The nearest, ties to even codes, at most +-448; NaN becomes 0x7f."""
    size = np.nan_to_num(np.minimum(np.abs(x).astype(np.float64), 448.0))
    above = np.searchsorted(_E4M3, size).clip(1, 0x7E)
    low, high = size - _E4M3[above - 1], _E4M3[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0)).astype(U8)


def _to_f16(x):
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(U16)


# Of float32 each is rounded once: these by numpy in float32, the others from float64.
_ROUNDED = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.fmax, "min": np.fmin,
    "neg": np.negative, "abs": np.abs,
}  # fmt: skip
_EXACT = {
    "fma": lambda a, b, c: a * b + c, "ex2": np.exp2, "rsqrt": lambda a: a**-0.5, "rcp": lambda a: 1 / a,
}  # fmt: skip
# Of integers, whose bits are the same whatever their sign.
_WRAPPED = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c,
}  # fmt: skip
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}

HALVES = {"bf16": (_bf16, _to_bf16), "f16": (_f16, _to_f16)}
"""Format -> (its bits as float32, float32 rounded to its bits)."""


class Arithmetic:
    """Instructions of a warp, which has `value`, `put` and the registers `r`.

    p: the operation's words; on: the threads that take part.
    """

    def calculate(self, p, args, on):
        t = p[-1]
        if t.removesuffix("x2") in HALVES:
            v = self._half(p, args)
        elif t == "f32":
            v = self._float(p[0], [self.value(a, np.float32) for a in args[1:]])
        else:
            v = self._integer(p, args)
        self.put(args[0], v, on)

    def _float(self, name, x):
        """Of float32, rounded once."""
        if name in _ROUNDED:
            return _ROUNDED[name](*x)
        return chosen(_EXACT, name)(*(v.astype(np.float64) for v in x)).astype(np.float32)

    def _half(self, p, args):
        pair = p[-1].endswith("x2")
        read, write = HALVES[p[-1].removesuffix("x2")]
        bits = [self.value(a, U32 if pair else U16) for a in args[1:]]

        def one(parts):
            return write(self._float(p[0], [read(x.astype(U16)) for x in parts]))

        if not pair:
            return one(bits)
        low, high = one([x & U32(0xFFFF) for x in bits]), one([x >> U32(16) for x in bits])
        return low.astype(U32) | (high.astype(U32) << U32(16))

    def _integer(self, p, args):
        kind = np.dtype(type_of(p[-1]))
        wide = "wide" in p
        size = 8 if wide else kind.itemsize
        if kind.itemsize == 8 and (kind.kind == "u" and p[0] in ("div", "rem", "max", "min") or "hi" in p):
            raise UnknownInstruction(".".join(p))
        if p[0] in _WRAPPED and not wide and "hi" not in p:
            return _WRAPPED[p[0]](*(self.value(a, UNSIGNED[size]) for a in args[1:]))
        # 64 bits wrap as they should, whatever their sign.
        x = [self.value(a, kind).astype(np.int64) for a in args[1:3]]
        if len(args) > 3:
            x.append(self.value(args[3], np.int64 if wide else kind).astype(np.int64))
        if p[0] in ("div", "rem"):
            q, r = np.divmod(abs(x[0]), abs(x[1]))
            v = np.where((x[0] < 0) != (x[1] < 0), -q, q) if p[0] == "div" else np.where(x[0] < 0, -r, r)
        elif "hi" in p:
            v = np.array([int(a) * int(b) >> 32 for a, b in zip(*x[:2])], np.int64) + (x[2] if len(x) > 2 else 0)
        else:
            table = {
                "mul": lambda: x[0] * x[1], "mad": lambda: x[0] * x[1] + x[2],
                "max": lambda: np.maximum(x[0], x[1]), "min": lambda: np.minimum(x[0], x[1]),
                "neg": lambda: -x[0], "abs": lambda: abs(x[0]),
            }  # fmt: skip
            v = chosen(table, p[0])()
        return v.view(U64).astype(UNSIGNED[size])

    def bitwise(self, p, args, on):
        t = p[-1]
        if p[0] in _BITWISE:
            v = _BITWISE[p[0]](*(self.predicate(a) if t == "pred" else self.value(a, type_of(t)) for a in args[1:]))
        elif p[0] == "lop3":
            a, b, c = (self.value(x, U32) for x in args[1:4])
            table, v = int(args[4], 0), np.zeros(self.n, U32)
            for i in range(8):
                if table >> i & 1:
                    v |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        elif p[0] == "shf":
            if p[2] != "wrap":
                raise UnknownInstruction(".".join(p))
            low, high, by = (self.value(x, U32).astype(U64) for x in args[1:4])
            both, by = low | (high << U64(32)), by & U64(31)
            v = ((both << by) >> U64(32) if p[1] == "l" else both >> by).astype(U32)
        elif p[0] == "popc":
            v = np.array([int(x).bit_count() for x in self.value(args[1], U32)], U32)
        elif p[0] in ("shl", "shr"):
            a, b = self.value(args[1], type_of(t)), self.value(args[2], U32)
            bits = 8 * a.dtype.itemsize
            by = np.minimum(b, bits - 1).astype(a.dtype)
            v = (a << by) if p[0] == "shl" else (a >> by)
            v = np.where(b >= bits, 0 if p[0] == "shl" or a.dtype.kind == "u" else v, v).astype(a.dtype)
        else:  # bfe
            a, start, length = self.value(args[1], type_of(t)).astype(np.int64), int(args[2]), int(args[3])
            v = (a >> start) & ((1 << length) - 1)
            if t == "s32":
                v = np.where(v >> (length - 1) & 1, v - (1 << length), v)
            v = v.astype(np.int32)
        self.put(args[0], v, on)

    def compare(self, p, args, on):
        t = p[-1]
        read = HALVES[t][0] if t in HALVES else None
        a, b = (read(self.value(x, U16)) if read else self.value(x, type_of(t)) for x in args[1:3])
        unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(self.n, bool)
        ordered = {
            "eq": lambda: a == b, "ne": lambda: a != b, "lt": lambda: a < b, "le": lambda: a <= b, "gt": lambda: a > b,
            "ge": lambda: a >= b,
            "num": lambda: ~unordered, "nan": lambda: unordered,
        }  # fmt: skip
        name = p[1]
        if name in ordered:
            v = ordered[name]() & (~unordered | (name == "nan"))
        else:
            v = chosen(ordered, name.removesuffix("u"))() | unordered
        if len(args) > 3:
            other = self.predicate(args[3])
            v = {"and": v & other, "or": v | other}[p[2]]
        self.put(args[0], v, on)

    def permute(self, p, args, on):
        """prmt: each byte one of eight, or its sign eight times."""
        a, b, selector = (self.value(x, U32).astype(U64) for x in args[1:4])
        if p[1:] != ["b32"]:
            raise UnknownInstruction(".".join(p))
        both, v = a | (b << U64(32)), np.zeros(self.n, U64)
        for i in range(4):
            nibble = selector >> U64(4 * i) & U64(15)
            byte = both >> (U64(8) * (nibble & U64(7))) & U64(0xFF)
            sign = np.where(byte & U64(0x80), U64(0xFF), U64(0))
            v |= np.where(nibble & U64(8), sign, byte) << U64(8 * i)
        self.put(args[0], v.astype(U32), on)

    def convert(self, p, args, on):
        to, source = p[-2:]
        if source == "e4m3x2" and to == "f16x2":
            pair = self.value(args[1], U16)
            low, high = (_to_f16(_e4m3(x)).astype(U32) for x in (pair & U16(0xFF), pair >> U16(8)))
            v = low | (high << U32(16))
        elif to == "e4m3x2" and source == "f32" and "satfinite" in p:
            high, low = (_to_e4m3(self.value(a, np.float32)).astype(U16) for a in args[1:3])
            v = low | (high << U16(8))
        elif to in ("bf16x2", "f16x2"):
            write = HALVES[to[:-2]][1]
            high, low = (write(self.value(a, np.float32)).astype(U32) for a in args[1:3])
            v = low | (high << U32(16))
        elif source in HALVES:
            v = HALVES[source][0](self.value(args[1], U16))
        elif to in HALVES:
            v = HALVES[to][1](self.value(args[1], type_of(source)).astype(np.float32))
        else:
            x = self.value(args[1], type_of(source))
            if to != "f32" and x.dtype.kind == "f":
                raise UnknownInstruction(".".join(p))
            v = x.astype(type_of(to))  # of integers: signs extend as the source has them
            if to == "s8":
                v = v.astype(np.int16)  # no register is smaller, and the sign fills it
        self.put(args[0], v, on)
