"""Counter-based random numbers in a kernel: the same words and uniforms as `nanovllm.kernels.ops.sample`."""

import triton
import triton.language as tl

from nanovllm.kernels.triton.device_math import INTERPRETED, log1p


@triton.jit
def philox_four(c0, c1, k0, k1):
    """The four output words of Philox4x32-10 for the counter (c0, c1, 0, 0) and the key (k0, k1); all uint32.

    As `tl.philox(key, c0, c1, 0, 0)`, but from 64-bit products (one instruction gives both halves), and without the
    product that is zero in the first round.
    """
    A: tl.constexpr = 0xD2511F53
    B: tl.constexpr = 0xCD9E8D57
    # Round 1, with c2 = c3 = 0: the product with B is zero.
    p = c0.to(tl.uint64) * A
    x0 = c1 ^ k0
    x2 = (p >> 32).to(tl.uint32) ^ k1
    x3 = p.to(tl.uint32)
    x1 = x3 & 0
    for _ in tl.static_range(9):
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
        p0 = x0.to(tl.uint64) * A
        p1 = x2.to(tl.uint64) * B
        x0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = p1.to(tl.uint32)
        x3 = p0.to(tl.uint32)
    return x0, x1, x2, x3


if INTERPRETED:

    @triton.jit
    def _product(x, M: tl.constexpr):
        p = x.to(tl.uint64) * M
        return p.to(tl.uint32), (p >> 32).to(tl.uint32)

    @triton.jit
    def _halves(word):
        return word.to(tl.uint16), (word >> 16).to(tl.uint16)
else:

    @triton.jit
    def _product(x, M: tl.constexpr):
        """(low, high half) of uint32 x * M, always in one instruction; the compiler takes two where it knows bits of
        x."""
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$0, $1}, t; }",
            "=r,=r,r,r", [x, M], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def _halves(word):
        """(low, high half) of uint32 words, which cost nothing where they end up in one register again."""
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], dtype=(tl.uint16, tl.uint16), is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def _words_of_one(c0, c1, k0, k1, ROUNDS: tl.constexpr):
    """As `philox_four`, of ROUNDS rounds, for one c1 and key, scalars: what they alone decide in the first rounds is
    computed once a warp."""
    A: tl.constexpr = 0xD2511F53
    B: tl.constexpr = 0xCD9E8D57
    low, high = _product(c0, A)
    q = (c1 ^ k0).to(tl.uint64) * A  # the second round's, a scalar
    k0 = k0 + 0x9E3779B9
    x1, x0 = _product(high ^ k1, B)
    k1 = k1 + 0xBB67AE85
    x0 = x0 ^ k0
    x2 = low ^ ((q >> 32).to(tl.uint32) ^ k1)
    x3 = q.to(tl.uint32)
    for _ in tl.static_range(ROUNDS - 2):
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
        low0, high0 = _product(x0, A)
        low1, high1 = _product(x2, B)
        x0 = high1 ^ (x1 ^ k0)
        x2 = high0 ^ (x3 ^ k1)
        x1, x3 = low1, low0
    return x0, x1, x2, x3


@triton.jit
def philox_halves(first, c1, k0, k1, COUNT: tl.constexpr, EACH: tl.constexpr, ROUNDS: tl.constexpr):
    """[COUNT] uint16: the eight halves of the output words of Philox4x32-ROUNDS for the counters (first + i, c1, 0,
    0), side by side.

    Half h of word w (0 is the low one) of counter c stands at position 8 * (c - first) + 2 * w + h. EACH, 8 or 4, is
    how many side by side a thread is to hold: none moves to another thread; with 4, two threads compute the same
    counter. COUNT is a multiple of 8.
    """
    lane = tl.arange(0, COUNT // EACH)
    c0 = (first + lane // (8 // EACH)).to(tl.uint32)
    w0, w1, w2, w3 = _words_of_one(c0, c1.to(tl.uint32), k0, k1, ROUNDS)
    if EACH == 8:
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        tl.static_assert(EACH == 4, "a thread holds 8 or 4")
        words = tl.interleave(tl.where(lane % 2 == 0, w0, w2), tl.where(lane % 2 == 0, w1, w3))
    low, high = _halves(words)
    return tl.interleave(low, high)


@triton.jit
def uniform(word):
    """A random word as float32 in (0, 1): min(float32(word) + 0.5, 2^32 - 256) * 2^-32."""
    return tl.minimum(word.to(tl.float32) + 0.5, 4294967040.0) * 2.3283064365386963e-10


@triton.jit
def exponential(word):
    """A random word as a standard exponential variate, positive and finite."""
    return -log1p(-uniform(word))
