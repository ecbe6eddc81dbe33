"""From a row's candidates to the threshold of its filters: the second half of `sampling_filters`.

A few hundred candidates are compared with each other. Up to `CAPACITY` are held in registers while the threshold is
found bit by bit, from the highest: is the count (top-k), or the mass (top-p), of the logits from here on still large
enough? A row with more (thousands of equal logits, or a top-k beyond the number of groups) is searched so in memory,
which is right but slow.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.sampling.keys import COUNTERS, order_key, row_best, row_filters, weight_of

CAPACITY = 4096
SCAN_BLOCK = 8192
FEW = tl.constexpr(512)  # candidates that are compared with each other at once
_PEERS = tl.constexpr(16)


@triton.jit
def _tally(
    row, count, keys, weights, ids, from_key, below_id, best, t,
    MODE: tl.constexpr, SHIFT: tl.constexpr, IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many logits have a key >= from_key (MODE "count"), their mass ("mass"), or how many have that very key and
    an id below `below_id` ("ties"): int64. The logits are blocks in registers, or `count` of them at `row` in memory.
    """
    if IN_MEMORY:
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, count, BLOCK):
            id = start + tl.arange(0, BLOCK)
            x = tl.load(row + id, id < count, other=-float("inf")).to(tl.float32)
            key = order_key(x) >> SHIFT
            if MODE == "count":
                total += ((id < count) & (key >= from_key)).to(tl.int64)
            elif MODE == "mass":
                total += tl.where((id < count) & (key >= from_key), weight_of(x, best, t), 0)
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
def _resolve_few(candidates, candidate_ids, scratch, count, vocab_size, k, p, best, t, total_mass, base_mass):
    """As `_resolve`, for at most FEW candidates, with the whole key: each is compared with all others, some at a
    time."""
    lane = tl.arange(0, FEW)
    inside = lane < count
    x = tl.load(candidates + lane, inside, other=-float("inf"))
    id = tl.load(candidate_ids + lane, inside, other=0)
    key = order_key(x)
    weight = weight_of(x, best, t)
    keep = inside
    last_id = vocab_size + tl.zeros([], tl.int32)
    least = tl.min(tl.where(inside, key, 0x7FFFFFFF), 0)
    if k > 0:
        larger = tl.zeros([FEW], tl.int32)
        for start in range(0, count, _PEERS):
            peer = start + tl.arange(0, _PEERS)
            peer_key = order_key(tl.load(candidates + peer, peer < count, other=-float("inf")))
            larger += tl.sum(((peer < count)[:, None] & (peer_key[:, None] > key[None, :])).to(tl.int32), 0)
        keep = inside & (larger < k)
        least = tl.min(tl.where(keep, key, 0x7FFFFFFF), 0)
        if p < 1.0:
            total_mass = tl.sum(tl.where(keep, weight, 0), 0)
    if p < 1.0:
        needed = p.to(tl.float64) * total_mass.to(tl.float64)
        tl.store(scratch + lane, weight, inside)
        tl.debug_barrier()
        before = base_mass + tl.zeros([FEW], tl.int64)
        for start in range(0, count, _PEERS):
            peer = start + tl.arange(0, _PEERS)
            peer_key = order_key(tl.load(candidates + peer, peer < count, other=-float("inf")))
            peer_id = tl.load(candidate_ids + peer, peer < count, other=0)
            peer_weight = tl.load(scratch + peer, (peer < count) & (peer_key >= least), other=0)
            ahead = (peer_key[:, None] > key[None, :]) | (
                (peer_key[:, None] == key[None, :]) & (peer_id[:, None] < id[None, :])
            )
            before += tl.sum(tl.where(ahead, peer_weight[:, None], 0), 0)
        keep = keep & (before.to(tl.float64) < needed)
        if tl.max(keep.to(tl.int32), 0) == 0:  # a p that underflowed: keep the best token
            largest = tl.max(tl.where(inside, key, -0x80000000), 0)
            keep = inside & (key == largest) & (id == tl.min(tl.where(inside & (key == largest), id, 0x7FFFFFFF), 0))
        least = tl.min(tl.where(keep, key, 0x7FFFFFFF), 0)
        last_id = tl.max(tl.where(keep & (key == least), id, 0), 0)
    return least, last_id


@triton.jit(do_not_specialize=["has_k", "has_p"], do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def resolve_kernel(
    logits, temperature, top_k, top_p, maxima, counters, bins, candidates, candidate_ids, thresholds,
    vocab_size, stride, groups, has_k, has_p,
    SHIFT: tl.constexpr, ID_BITS: tl.constexpr, CAPACITY: tl.constexpr,
    BINS: tl.constexpr, SCAN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k, p = row_filters(top_k, top_p, row, vocab_size, has_k, has_p)
    key = tl.full([], -0x80000000, tl.int64).to(tl.int32)
    last_id = vocab_size + tl.zeros([], tl.int32)
    if (t != 0.0) & ((k > 0) | (p < 1.0)):
        best = row_best(maxima + row * groups, groups, GROUPS)
        count = tl.load(counters + row * COUNTERS)
        total_mass = tl.load((counters + row * COUNTERS + 2).to(tl.pointer_type(tl.int64)))
        base_mass = tl.load((counters + row * COUNTERS + 4).to(tl.pointer_type(tl.int64)))
        if (count > 0) & (count <= FEW):
            key, last_id = _resolve_few(
                candidates + row * CAPACITY, candidate_ids + row * CAPACITY, bins + row * BINS, count, vocab_size, k,
                p, best, t,
                total_mass, base_mass,
            )  # fmt: skip
            key = key >> SHIFT
        elif count <= CAPACITY:
            slot = tl.arange(0, CAPACITY)
            x = tl.load(candidates + row * CAPACITY + slot, slot < count, other=-float("inf"))
            ids = tl.load(candidate_ids + row * CAPACITY + slot, slot < count, other=0)
            key, last_id = _resolve(
                logits, count, order_key(x) >> SHIFT, weight_of(x, best, t), ids, vocab_size, k, p, best, t, total_mass,
                base_mass, SHIFT, False, ID_BITS, CAPACITY,
            )  # fmt: skip
        else:
            key, last_id = _resolve(
                logits + row.to(tl.int64) * stride, vocab_size, 0, 0, 0, vocab_size, k, p, best, t, total_mass,
                tl.zeros([], tl.int64), SHIFT, True, ID_BITS, SCAN,
            )  # fmt: skip
    tl.store(thresholds + row * 2, key)
    tl.store(thresholds + row * 2 + 1, last_id)
