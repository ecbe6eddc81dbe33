"""Counter-based random numbers in a kernel: the same words and uniforms as `nanovllm.kernels.ops.sample`."""

import triton
import triton.language as tl


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


@triton.jit
def philox_words(first, c1, k0, k1, COUNT: tl.constexpr):
    """[COUNT] uint32: the output words for the counters (first + i, c1, 0, 0), the four words of each side by side.

    COUNT is a multiple of 4. Word c % 4 of counter c // 4 stands at position c - 4 * first.
    """
    c0 = first + tl.arange(0, COUNT // 4)
    zero = c0 * 0
    words = tl.philox((k1.to(tl.uint64) << 32) | k0.to(tl.uint64), c0.to(tl.uint32), (zero + c1).to(tl.uint32), zero, zero)
    return tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))


@triton.jit
def uniform(word):
    """A random word as float32 in (0, 1): min(max(float32(word), 0.5), 2^32 - 256) * 2^-32."""
    return tl.minimum(tl.maximum(word.to(tl.float32), 0.5), 4294967040.0) * 2.3283064365386963e-10
