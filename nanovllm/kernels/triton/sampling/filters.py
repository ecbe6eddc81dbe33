"""top-k and top-p as a threshold: exactly the set of tokens that the reference of `sample` keeps, without a sort.

A row's kept tokens are those with a logit above a threshold, and of those equal to it the ones with the lowest ids. Two
launches, three if a row of the batch has top-p, find the threshold and the last such id:

1. With top-p alone, `_mass_kernel` adds up the mass of the logits in each of many narrow bins. 2. `_gather_kernel`
copies a row's *candidates* for the threshold. With top-k these are the logits not below the k-th largest
   of the maxima of groups: k groups hold one each, so the k-th largest logit is at least that. With top-p alone they
   are the logits in the bin where the mass from above first reaches p.
3. `resolve_kernel`, one program a row, finds the threshold among the candidates.

Masses are sums of integers, in units of 2^-40 of the largest weight, as in the reference: exact in any order.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2
from nanovllm.kernels.triton.sampling.filter_threshold import CAPACITY, SCAN_BLOCK, resolve_kernel
from nanovllm.kernels.triton.sampling.keys import (
    BINS,
    COUNTERS,
    KEY_SHIFT,
    block_max,
    order_key,
    row_best,
    row_filters,
    split,
    weight_of,
)

_BLOCK = 1024
_PROGRAMS = 8  # on each multiprocessor


@triton.jit
def _kth_largest(values, k, SHIFT: tl.constexpr):
    """The k-th largest float32 of a block, rounded down to the key's bits above SHIFT; as such a key."""
    BITS: tl.constexpr = 32 - SHIFT
    keys = order_key(values) >> SHIFT
    lowest = tl.full([], -(1 << (BITS - 1)), tl.int64)
    found = tl.zeros([], tl.int64)
    for i in range(BITS):
        trial = found + (tl.full([], 1, tl.int64) << (BITS - 1 - i))
        enough = tl.sum((keys >= (trial + lowest).to(tl.int32)).to(tl.int32), 0) >= k
        found = tl.where(enough, trial, found)
    return (found + lowest).to(tl.int32)


@triton.jit
def _bin(x, best, t, p, vocab_size, BINS: tl.constexpr):
    """The bin of logits, rising as they fall; BINS or more where the logit cannot be top-p's threshold.

    It cannot if the vocabulary's V tokens together, at its weight w relative to the largest, would not reach the last
    1 - p of the mass: V w <= 1 - p. (Half of that, for the rounding of what follows.)
    """
    width = -tl.log((1.0 - p) * 0.5 / vocab_size) * t * (1.0 / BINS)
    return tl.minimum((best - x) / width, 2.0 * BINS).to(tl.int32)


@triton.jit(
    do_not_specialize=["blocks_per_program", "has_k", "has_p"],
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p"],
)
def _mass_kernel(
    logits, temperature, top_k, top_p, maxima, counters, bins,
    vocab_size, stride, groups, has_k, has_p, blocks_per_program,
    BINS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = row_filters(top_k, top_p, row, vocab_size, has_k, has_p)
    if (t != 0.0) & (k == 0) & (p < 1.0):
        best = row_best(maxima + row * groups, groups, GROUPS)
        total = tl.zeros([BLOCK], tl.int64)
        logits += row.to(tl.int64) * stride
        for i in range(blocks_per_program):
            col = (tl.program_id(1) * blocks_per_program + i) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + col, col < vocab_size, other=-float("inf")).to(tl.float32)
            weight = weight_of(x, best, t)
            bin = _bin(x, best, t, p, vocab_size, BINS)
            total += weight
            tl.atomic_add(bins + row * BINS + bin, weight, (bin >= 0) & (bin < BINS) & (weight > 0), sem="relaxed")
        tl.atomic_add((counters + row * COUNTERS + 2).to(tl.pointer_type(tl.int64)), tl.sum(total, 0), sem="relaxed")


@triton.jit(
    do_not_specialize=["blocks_per_program", "has_k", "has_p"],
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p"],
)
def _gather_kernel(
    logits, temperature, top_k, top_p, maxima, counters, bins, candidates, candidate_ids,
    vocab_size, stride, groups, has_k, has_p, blocks_per_program,
    CAPACITY: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = row_filters(top_k, top_p, row, vocab_size, has_k, has_p)
    counters += row * COUNTERS
    if (t != 0.0) & ((k > 0) | (p < 1.0)):
        best = tl.zeros([], tl.float32)
        least_key = tl.full([], -0x80000000, tl.int64).to(tl.int32)
        wanted = tl.zeros([], tl.int32)
        if k > 0:
            if k <= groups:
                index = tl.arange(0, GROUPS)
                m = tl.load(maxima + row * groups + index, index < groups, other=-float("inf"))
                least_key = _kth_largest(m, k, 16)
        else:
            best = row_best(maxima + row * groups, groups, GROUPS)
            needed = p.to(tl.float64) * tl.load((counters + 2).to(tl.pointer_type(tl.int64))).to(tl.float64)
            mass = tl.load(bins + row * BINS + tl.arange(0, BINS))
            below = tl.cumsum(mass, 0).to(tl.float64) < needed
            wanted = tl.sum(below.to(tl.int32), 0)
            if tl.program_id(1) == 0:
                tl.store((counters + 4).to(tl.pointer_type(tl.int64)), tl.sum(tl.where(below, mass, 0), 0))
        logits += row.to(tl.int64) * stride
        for i in range(blocks_per_program):
            block = tl.program_id(1) * blocks_per_program + i
            largest = block_max(maxima, row, block, groups, BLOCK)
            if k > 0:
                any_here = (order_key(largest) >> 16) >= least_key
            else:
                any_here = _bin(largest, best, t, p, vocab_size, BINS) <= wanted
            if any_here:
                col = block * BLOCK + tl.arange(0, BLOCK)
                keep = col < vocab_size
                x = tl.load(logits + col, keep, other=-float("inf")).to(tl.float32)
                if k > 0:
                    keep = keep & ((order_key(x) >> 16) >= least_key)
                else:
                    keep = keep & (_bin(x, best, t, p, vocab_size, BINS) == wanted)
                found = tl.sum(keep.to(tl.int32), 0)
                if found > 0:
                    slot = tl.atomic_add(counters, found, sem="relaxed") + tl.cumsum(keep.to(tl.int32), 0) - 1
                    keep = keep & (slot < CAPACITY)
                    tl.store(candidates + row * CAPACITY + slot, x, keep)
                    tl.store(candidate_ids + row * CAPACITY + slot, col, keep)


def filter_thresholds(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None,
    maxima: torch.Tensor, counters: torch.Tensor, bins: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[R, 2] int32: the key (`order_key`, shifted) of each row's threshold, and the last id kept among equals.

    Args:
        logits, temperature, top_k, top_p: as `sample`; not both filters None.
        maxima: [R, groups] float32, the largest of each GROUP of a row's logits.
        counters: [R, COUNTERS] int32, bins: [R, BINS] int64; zeros, which are used up.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    candidates = torch.empty((rows, CAPACITY), dtype=torch.float32, device=device)
    candidate_ids = torch.empty((rows, CAPACITY), dtype=torch.int32, device=device)
    thresholds = torch.empty((rows, 2), dtype=torch.int32, device=device)
    has_k, has_p = int(top_k is not None), int(top_p is not None)
    # Something of the same type in place of a filter that is off, so that no kernel is compiled twice.
    k = counters if top_k is None else top_k.contiguous()
    p = temperature if top_p is None else top_p.contiguous()
    groups = maxima.shape[1]
    padded_groups = next_power_of_2(groups)
    row_inputs = (logits, temperature, k, p, maxima, counters, bins)
    sizes = (vocab_size, logits.stride(0), groups, has_k, has_p)
    pieces, per_program = split(cdiv(vocab_size, _BLOCK), logits, _PROGRAMS)
    if has_p:
        _mass_kernel[(rows, pieces)](
            *row_inputs, *sizes, per_program, BINS, _BLOCK, padded_groups, num_warps=4, enable_fp_fusion=False
        )
    _gather_kernel[(rows, pieces)](
        *row_inputs, candidates, candidate_ids, *sizes, per_program, CAPACITY, BINS, _BLOCK, padded_groups,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    resolve_kernel[(rows,)](
        *row_inputs, candidates, candidate_ids, thresholds, *sizes, KEY_SHIFT[logits.dtype], vocab_size.bit_length(),
        CAPACITY, BINS, SCAN_BLOCK, padded_groups, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds
