"""What the kernels of `sample` share: logits as ordered integers, their maxima and weights, a row's parameters."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.sample import BLOCK
from nanovllm.kernels.triton.device_math import exp
from nanovllm.kernels.triton.launch_arguments import cdiv, num_sms

BINS = 1024
# Logits of which `maxima` keeps the largest: the blocks that a draw first chooses from.
GROUP = tl.constexpr(BLOCK)

# int32 fields of a row's counters: 0 candidates, 2 and 3 the row's mass, 4 and 5 the mass above the candidates (64
# bits each).
COUNTERS = tl.constexpr(8)

# Low bits of a logit's key that its dtype leaves constant.
KEY_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def split(tiles: int, logits: torch.Tensor, programs: int) -> tuple[int, int]:
    """(programs for each row, tiles for each program), with about `programs` programs on each multiprocessor."""
    per_program = cdiv(tiles, max(1, programs * num_sms(logits) // logits.shape[0]))
    return cdiv(tiles, per_program), per_program


@triton.jit
def pair_sum(x):
    """The sums of rows of x [n, GROUP], in the reference's order: a sum of two is the same in any layout. [n]."""
    n: tl.constexpr = x.shape[0]
    size: tl.constexpr = GROUP
    tl.static_assert(x.shape[1] == size and size == 256)
    for level in tl.static_range(8):
        x = tl.sum(tl.reshape(x, [n, 128 >> level, 2]), 2)
    return tl.reshape(x, [n])


@triton.jit
def order_key(x):
    """int32 with the order of float32 x; 0 and -0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_best(maxima, groups, GROUPS: tl.constexpr):
    """A row's largest logit; finite, so that a row of nothing but -inf does not turn into NaN."""
    index = tl.arange(0, GROUPS)
    best = tl.max(tl.load(maxima + index, index < groups, other=-float("inf")), 0)
    return tl.maximum(best, -3.4028234663852886e38)


@triton.jit
def block_max(maxima, row, block, groups, BLOCK: tl.constexpr):
    """The largest of one block's logits."""
    PER_BLOCK: tl.constexpr = BLOCK // GROUP
    group = block * PER_BLOCK + tl.arange(0, PER_BLOCK)
    return tl.max(tl.load(maxima + row * groups + group, group < groups, other=-float("inf")), 0)


@triton.jit
def weight_of(x, best, t):
    """The reference's integer weight of logits, int64."""
    return (exp(tl.div_rn(x - best, t)) * 1099511627776.0).to(tl.int64)


@triton.jit
def row_filters(top_k, top_p, row, vocab_size, has_k, has_p):
    """(k, p) of a row; k = 0 and p = 1 where off."""
    k = tl.zeros([], tl.int32)
    p = tl.full([], 1.0, tl.float32)
    if has_k != 0:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((k <= 0) | (k >= vocab_size), 0, k)
    if has_p != 0:
        p = tl.load(top_p + row)
    return k, p
