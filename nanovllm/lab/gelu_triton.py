"""gelu in Triton: a program is a block of elements."""

import triton
import triton.language as tl


@triton.jit
def gelu_kernel(x, y, elements, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    v = tl.load(x + i, inside).to(tl.float32)
    u = 0.7978845608028654 * v * (1.0 + 0.044715 * v * v)
    # 1 + tanh(u) = 2 / (1 + e^-2u), which does not cancel for negative x.
    tl.store(y + i, (v / (1.0 + tl.exp(-2.0 * u))).to(y.dtype.element_ty), inside)
