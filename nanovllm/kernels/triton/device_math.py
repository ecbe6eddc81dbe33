"""What the kernels share: rounding to a dtype, and elementary functions that neither overflow nor cancel.

Arithmetic is float32; a function that ends in another dtype says where it rounds.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:
    # The interpreter has no libdevice, and it truncates to bfloat16 where the hardware rounds.
    @triton.jit
    def to_dtype(x, dtype: tl.constexpr):
        if dtype == tl.bfloat16 and x.dtype == tl.float32:
            bits = x.to(tl.uint32, bitcast=True)
            nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
            return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return x.to(dtype)

    @triton.jit
    def product(x, y):
        return x * y

    @triton.jit
    def ex2(x):
        return tl.exp2(x)

    @triton.jit
    def rcp(x):
        return 1.0 / x

    @triton.jit
    def wide(x):
        return x.to(tl.float32)

    @triton.jit
    def round2(x, dtype: tl.constexpr):
        return to_dtype(x, dtype).to(tl.float32)

    @triton.jit
    def exp(x):
        return tl.exp(x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def log(x):
        return tl.log(x.to(tl.float64)).to(tl.float32)

    @triton.jit
    def log1p(x):
        # log(1 + x) * x / ((1 + x) - 1) undoes the rounding of 1 + x (Kahan).
        wide = x.to(tl.float64)
        one_plus = wide + 1.0
        change = one_plus - 1.0
        exact = tl.log(one_plus) * (wide / tl.where(change == 0.0, 1.0, change))
        return tl.where(change == 0.0, wide, exact).to(tl.float32)
else:

    @triton.jit
    def to_dtype(x, dtype: tl.constexpr):
        """x rounded to nearest, ties to even."""
        return x.to(dtype)

    # libdevice.mul_rn would flush subnormals, which bfloat16 and float32 share.
    @triton.jit
    def product(x, y):
        """float32 x * y, never contracted. A rounded product in a sum is else narrowed to 16 bits, and then fused
        with the sum (fma.rn.bf16): its rounding is lost, and with it a last bit of one in five sums of two products.
        """
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def ex2(x):
        """2^x in one instruction, to a relative 2^-22; results below 2^-126 are 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def rcp(x):
        """1 / x in one instruction, to one unit in the last place; results below 2^-126 are 0."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def wide(x):
        """x as float32: two instructions for two bfloat16, where the compiler takes three."""
        if x.dtype == tl.bfloat16 and x.numel > 1:  # of a single element there are no two to pack
            return tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True,
                pack=2
            )  # fmt: skip
        else:
            return x.to(tl.float32)

    @triton.jit
    def round2(x, dtype: tl.constexpr):
        """`rounded`, in three instructions for two bfloat16."""
        if dtype == tl.bfloat16 and x.numel > 1:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
                "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return to_dtype(x, dtype).to(tl.float32)

    # tl.exp and tl.log are the fast approximations in some versions of Triton; these are PyTorch's functions.
    @triton.jit
    def exp(x):
        return libdevice.exp(x)

    @triton.jit
    def log(x):
        return libdevice.log(x)

    @triton.jit
    def log1p(x):
        return libdevice.log1p(x)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x as float32, but with the precision of dtype: what storing and loading it again gives."""
    return to_dtype(x, dtype).to(tl.float32)


@triton.jit
def _logistic_product(x, z):
    """x / (1 + exp(-z)) to a few units in the last place; where exp(z) is below 2^-126, 0.

    From e = exp(-|z|), in [0, 1]: nothing overflows, so that the reciprocal is one instruction and a Newton step.
    """
    a = tl.maximum(-tl.abs(z), -150.0)
    high = a * 1.4426950408889634
    low = tl.fma(a, 1.4426950408889634, -high)
    low = tl.fma(a, 1.925963033500e-8, low)
    e = ex2(high)
    e = tl.fma(e, low * 0.6931471805599453, e)
    d = 1.0 + e
    r = rcp(d)
    r = tl.fma(r, tl.fma(-d, r, 1.0), r)
    return tl.where(z >= 0.0, x, x * e) * r


@triton.jit
def fast_exp(x, dtype: tl.constexpr):
    """e^x, to a relative 2^-23 |x| where the result will be rounded to 16 bits."""
    if dtype == tl.float32:
        return exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _gelu(x, dtype: tl.constexpr):
    """x times the normal distribution function."""
    if dtype == tl.float32:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif dtype == tl.bfloat16:
        # The distribution function is the logistic function of x P(x^2), here with P to relative errors of 1.3e-3, a
        # third of what rounding gives, for x above -5; below, the result is off by 2e-9 at most.
        u = x * x
        p = -2.2976465 + u * (-0.10939677 + u * (1.4235603e-3 + u * -1.3032e-5))
        return x * rcp(1.0 + ex2(x * p))
    else:
        # The upper tail to 1e-7, in half the instructions (Abramowitz and Stegun, 7.1.26, of |x| / sqrt(2),
        # coefficients halved).
        t = rcp(1.0 + 0.23164189263955 * tl.abs(x))
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        tail = tail * ex2((x * x) * -0.7213475204444817)
        return x * tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def activation(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """The activation KIND of float32 x; `dtype` is what the result will be rounded to, and decides how exact it is."""
    # In 16 bits e^-z may become infinite: its reciprocal is then 0, the limit.
    if KIND == "silu":
        if dtype == tl.float32:
            return _logistic_product(x, x)
        return x * rcp(1.0 + ex2(x * -1.4426950408889634))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the logistic function of 2 z, which needs no tanh and does not cancel for negative z.
        if dtype == tl.float32:
            return _logistic_product(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
        # -1.5957691216057308 log2(e), and that times 0.044715
        return x * rcp(1.0 + ex2(x * (-2.302208198144325 + -0.10294323957002849 * (x * x))))
    elif KIND == "gelu":
        return _gelu(x, dtype)
    elif KIND == "mish":
        # tanh(log(1 + n)) = n (n + 2) / (n (n + 2) + 2) with n = e^x; from x = 20 on it is 1 in float32.
        n = fast_exp(tl.minimum(x, 20.0), dtype)
        t = n * (n + 2.0)
        return x * (t / (t + 2.0))
    else:
        tl.static_assert(KIND == "relu", "kind must be gelu, gelu_tanh, silu, mish or relu")
        return tl.where(x <= 0.0, 0.0, x)  # keeps NaN, as torch.relu does


@triton.jit
def gated_product(gate, up, KIND: tl.constexpr, dtype: tl.constexpr):
    """KIND(gate) * up as separate ops compute it: gate, up and the activation are each rounded to dtype. In float32."""
    return rounded(activation(rounded(gate, dtype), KIND, dtype), dtype) * rounded(up, dtype)
