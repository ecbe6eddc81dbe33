"""top-k and top-p as a threshold: exactly the set of tokens that the reference of `sample` keeps, without a sort.

A row's kept tokens are those with a logit above a threshold, and of those equal to it the ones with the lowest ids. Two
launches find the threshold and the last such id:

1. With top-p alone, `_mass_kernel` adds up the mass of the logits in each of many narrow bins.
2. `_gather_kernel` copies a row's *candidates* for the threshold. With top-k these are the logits not below the k-th largest
   of the maxima of groups: k groups hold one each, so the k-th largest logit is at least that. With top-p alone they are
   the logits in the bin where the mass from above first reaches p.
3. `_resolve_kernel`, one program a row, finds the threshold bit by bit, from the highest: is the count (top-k), or the mass
   (top-p), of the logits from here on still large enough? Its candidates are in registers. A row with more candidates than
   fit (thousands of equal logits, or a top-k beyond the number of groups) is searched in memory, which is right but slow.

Masses are sums of integers, in units of 2^-40 of the largest weight, as in the reference: exact in any order.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._launch import next_power_of_2
from nanovllm.kernels.triton_ops._math import exp

CAPACITY = 4096
BINS = 1024
_SCAN_BLOCK = 8192

# int32 fields of a row's counters: 0 programs that finished, 1 candidates, 2 and 3 the row's mass, 4 and 5 the mass above
# the candidates (64 bits each).
COUNTERS = tl.constexpr(8)

# Low bits of a logit's key that its dtype leaves constant.
KEY_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def order_key(x):
    """int32 with the order of float32 x; 0 and -0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_best(maxima, row, groups, GROUPS: tl.constexpr):
    """The row's largest logit; finite, so that a row of nothing but -inf does not turn into NaN."""
    index = tl.arange(0, GROUPS)
    best = tl.max(tl.load(maxima + row * groups + index, index < groups, other=-float("inf")), 0)
    return tl.maximum(best, -3.4028234663852886e38)


@triton.jit
def _weight(x, best, t):
    """The reference's integer weight of logits, int64."""
    return (exp(tl.div_rn(x - best, t)) * 1099511627776.0).to(tl.int64)


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
def _row_filters(top_k, top_p, row, vocab_size, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """(k, p) of a row; k = 0 and p = 1 where off."""
    k = tl.zeros([], tl.int32)
    p = tl.full([], 1.0, tl.float32)
    if TOP_K:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((k <= 0) | (k >= vocab_size), 0, k)
    if TOP_P:
        p = tl.load(top_p + row)
    return k, p


@triton.jit
def _bin(x, best, t, p, vocab_size, BINS: tl.constexpr):
    """The bin of logits, rising as they fall; BINS or more where the logit cannot be top-p's threshold.

    It cannot if the vocabulary's V tokens together, at its weight w relative to the largest, would not reach the last 1 - p
    of the mass: V w <= 1 - p. (Half of that, for the rounding of what follows.)
    """
    width = -tl.log((1.0 - p) * 0.5 / vocab_size) * t * (1.0 / BINS)
    return tl.minimum((best - x) / width, 2.0 * BINS).to(tl.int32)


@triton.jit
def _mass_kernel(
    logits, temperature, top_k, top_p, maxima, counters, bins, vocab_size, stride, groups, columns_per_program,
    TOP_K: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = _row_filters(top_k, top_p, row, vocab_size, TOP_K, True)
    if (t != 0.0) & (k == 0) & (p < 1.0):
        best = row_best(maxima, row, groups, GROUPS)
        total = tl.zeros([BLOCK], tl.int64)
        logits += row.to(tl.int64) * stride
        first = tl.program_id(1) * columns_per_program
        for start in range(first, first + columns_per_program, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = tl.load(logits + col, col < vocab_size, other=-float("inf")).to(tl.float32)
            weight = _weight(x, best, t)
            bin = _bin(x, best, t, p, vocab_size, BINS)
            total += weight
            tl.atomic_add(bins + row * BINS + bin, weight, (bin >= 0) & (bin < BINS) & (weight > 0), sem="relaxed")
        tl.atomic_add((counters + row * COUNTERS + 2).to(tl.pointer_type(tl.int64)), tl.sum(total, 0), sem="relaxed")


@triton.jit
def _gather_kernel(
    logits, temperature, top_k, top_p, maxima, counters, bins, candidates, candidate_ids,
    vocab_size, stride, groups, columns_per_program,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, CAPACITY: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = _row_filters(top_k, top_p, row, vocab_size, TOP_K, TOP_P)
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
        elif TOP_P:
            best = row_best(maxima, row, groups, GROUPS)
            needed = p.to(tl.float64) * tl.load((counters + 2).to(tl.pointer_type(tl.int64))).to(tl.float64)
            mass = tl.load(bins + row * BINS + tl.arange(0, BINS))
            below = tl.cumsum(mass, 0).to(tl.float64) < needed
            wanted = tl.sum(below.to(tl.int32), 0)
            if tl.program_id(1) == 0:
                tl.store((counters + 4).to(tl.pointer_type(tl.int64)), tl.sum(tl.where(below, mass, 0), 0))
        logits += row.to(tl.int64) * stride
        first = tl.program_id(1) * columns_per_program
        for start in range(first, first + columns_per_program, BLOCK):
            col = start + tl.arange(0, BLOCK)
            keep = col < vocab_size
            x = tl.load(logits + col, keep, other=-float("inf")).to(tl.float32)
            if k > 0:
                keep = keep & ((order_key(x) >> 16) >= least_key)
            elif TOP_P:
                keep = keep & (_bin(x, best, t, p, vocab_size, BINS) == wanted)
            found = tl.sum(keep.to(tl.int32), 0)
            if found > 0:
                slot = tl.atomic_add(counters + 1, found, sem="relaxed") + tl.cumsum(keep.to(tl.int32), 0) - 1
                keep = keep & (slot < CAPACITY)
                tl.store(candidates + row * CAPACITY + slot, x, keep)
                tl.store(candidate_ids + row * CAPACITY + slot, col, keep)


@triton.jit
def _tally(
    row, count, keys, weights, ids, from_key, below_id, best, t,
    MODE: tl.constexpr, SHIFT: tl.constexpr, IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many logits have a key >= from_key (MODE "count"), their mass ("mass"), or how many have that very key and an id
    below `below_id` ("ties"): int64. The logits are blocks in registers, or `count` of them at `row` in memory."""
    if IN_MEMORY:
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, count, BLOCK):
            id = start + tl.arange(0, BLOCK)
            x = tl.load(row + id, id < count, other=-float("inf")).to(tl.float32)
            key = order_key(x) >> SHIFT
            if MODE == "count":
                total += ((id < count) & (key >= from_key)).to(tl.int64)
            elif MODE == "mass":
                total += tl.where((id < count) & (key >= from_key), _weight(x, best, t), 0)
            else:
                total += ((id < count) & (key == from_key) & (id < below_id)).to(tl.int64)
        return tl.sum(total, 0)
    else:
        inside = tl.arange(0, BLOCK) < count
        if MODE == "count":
            return tl.sum((inside & (keys >= from_key)).to(tl.int32), 0).to(tl.int64)
        elif MODE == "mass":
            return tl.sum(tl.where(inside & (keys >= from_key), weights, 0), 0)
        else:
            return tl.sum((inside & (keys == from_key) & (ids < below_id)).to(tl.int32), 0).to(tl.int64)


@triton.jit
def _resolve(
    row, count, keys, weights, ids, vocab_size, k, p, best, t, total_mass, base_mass,
    SHIFT: tl.constexpr, IN_MEMORY: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key of the threshold, the last id kept among the logits equal to it); `base_mass` is above all of the logits."""
    BITS: tl.constexpr = 32 - SHIFT
    lowest = tl.full([], -(1 << (BITS - 1)), tl.int64)  # keys are signed; `found` counts from the lowest
    one = tl.full([], 1, tl.int64)
    found = tl.zeros([], tl.int64)
    last_id = vocab_size + tl.zeros([], tl.int32)
    if k > 0:
        for i in range(BITS):
            trial = found + (one << (BITS - 1 - i))
            key = (trial + lowest).to(tl.int32)
            n = _tally(row, count, keys, weights, ids, key, 0, best, t, "count", SHIFT, IN_MEMORY, BLOCK)
            found = tl.where(n >= k, trial, found)
        if p < 1.0:
            key = (found + lowest).to(tl.int32)
            total_mass = _tally(row, count, keys, weights, ids, key, 0, best, t, "mass", SHIFT, IN_MEMORY, BLOCK)
    if p < 1.0:
        needed = p.to(tl.float64) * total_mass.to(tl.float64)
        best_key = (order_key(best) >> SHIFT).to(tl.int64)
        at_least = found  # below the threshold of top-k nothing is left to add
        found = tl.zeros([], tl.int64)
        for i in range(BITS):
            trial = found + (one << (BITS - 1 - i))
            key = (tl.maximum(trial, at_least) + lowest).to(tl.int32)
            mass = _tally(row, count, keys, weights, ids, key, 0, best, t, "mass", SHIFT, IN_MEMORY, BLOCK)
            found = tl.where((base_mass + mass).to(tl.float64) >= needed, trial, found)
        found = tl.minimum(tl.maximum(found, at_least), best_key - lowest)  # a p that underflowed: keep the best token
        key = (found + lowest).to(tl.int32)
        ties = _tally(row, count, keys, weights, ids, key, vocab_size, best, t, "ties", SHIFT, IN_MEMORY, BLOCK)
        if ties > 1:
            mass_above = _tally(row, count, keys, weights, ids, key + 1, 0, best, t, "mass", SHIFT, IN_MEMORY, BLOCK)
            mass = _tally(row, count, keys, weights, ids, key, 0, best, t, "mass", SHIFT, IN_MEMORY, BLOCK)
            weight = (mass - mass_above) // ties
            last_id = tl.zeros([], tl.int32)
            for i in range(ID_BITS):
                trial_id = last_id + (tl.full([], 1, tl.int32) << (ID_BITS - 1 - i))
                before = _tally(row, count, keys, weights, ids, key, trial_id, best, t, "ties", SHIFT, IN_MEMORY, BLOCK)
                kept = ((base_mass + mass_above + before * weight).to(tl.float64) < needed) | (before == 0)
                last_id = tl.where(kept, trial_id, last_id)
    return (found + lowest).to(tl.int32), last_id


@triton.jit
def _resolve_kernel(
    logits, temperature, top_k, top_p, maxima, counters, candidates, candidate_ids, thresholds,
    vocab_size, stride, groups,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, SHIFT: tl.constexpr, ID_BITS: tl.constexpr, CAPACITY: tl.constexpr,
    SCAN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = _row_filters(top_k, top_p, row, vocab_size, TOP_K, TOP_P)
    key = tl.full([], -0x80000000, tl.int64).to(tl.int32)
    last_id = vocab_size + tl.zeros([], tl.int32)
    if (t != 0.0) & ((k > 0) | (p < 1.0)):
        best = row_best(maxima, row, groups, GROUPS)
        count = tl.load(counters + row * COUNTERS + 1)
        total_mass = tl.load((counters + row * COUNTERS + 2).to(tl.pointer_type(tl.int64)))
        base_mass = tl.load((counters + row * COUNTERS + 4).to(tl.pointer_type(tl.int64)))
        if count <= CAPACITY:
            slot = tl.arange(0, CAPACITY)
            x = tl.load(candidates + row * CAPACITY + slot, slot < count, other=-float("inf"))
            ids = tl.load(candidate_ids + row * CAPACITY + slot, slot < count, other=0)
            key, last_id = _resolve(
                logits, count, order_key(x) >> SHIFT, _weight(x, best, t), ids, vocab_size, k, p, best, t, total_mass,
                base_mass, SHIFT, False, ID_BITS, CAPACITY,
            )  # fmt: skip
        else:
            key, last_id = _resolve(
                logits + row.to(tl.int64) * stride, vocab_size, 0, 0, 0, vocab_size, k, p, best, t, total_mass,
                tl.zeros([], tl.int64), SHIFT, True, ID_BITS, SCAN,
            )  # fmt: skip
    tl.store(thresholds + row * 2, key)
    tl.store(thresholds + row * 2 + 1, last_id)


def filter_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    maxima: torch.Tensor,
    counters: torch.Tensor,
    bins: torch.Tensor,
    pieces: int,
    columns_per_program: int,
) -> torch.Tensor:
    """[R, 2] int32: the key (`order_key`, shifted) of each row's threshold, and the last id kept among equals.

    Args:
        logits, temperature, top_k, top_p: as `sample`; not both filters None.
        maxima: [R, groups] float32, the largest of each group of a row's logits; groups are equal runs of columns.
        counters: [R, COUNTERS] int32, bins: [R, BINS] int64 if there is a top_p. Zeros, which are used up, but for
            column 0 of the counters.
        pieces, columns_per_program: how many programs share a row, and how much of it each takes.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    candidates = torch.empty((rows, CAPACITY), dtype=torch.float32, device=device)
    candidate_ids = torch.empty((rows, CAPACITY), dtype=torch.int32, device=device)
    thresholds = torch.empty((rows, 2), dtype=torch.int32, device=device)
    has_k, has_p = top_k is not None, top_p is not None
    k = top_k.contiguous() if has_k else temperature
    p = top_p.contiguous() if has_p else temperature
    groups = maxima.shape[1]
    padded_groups = next_power_of_2(groups)
    row_inputs = (logits, temperature, k, p, maxima, counters)
    sizes = (vocab_size, logits.stride(0), groups)
    if has_p:
        _mass_kernel[(rows, pieces)](
            *row_inputs, bins, *sizes, columns_per_program, has_k, BINS, 1024, padded_groups, num_warps=4, enable_fp_fusion=False
        )
    _gather_kernel[(rows, pieces)](
        *row_inputs, bins, candidates, candidate_ids, *sizes, columns_per_program, has_k, has_p, CAPACITY, BINS, 1024,
        padded_groups, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _resolve_kernel[(rows,)](
        *row_inputs, candidates, candidate_ids, thresholds, *sizes, has_k, has_p, KEY_SHIFT[logits.dtype],
        vocab_size.bit_length(), CAPACITY, _SCAN_BLOCK, padded_groups, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds
