"""Sampling one token per row, in the two levels of the op's reference: a block of columns, then a token of it.

The vocabulary of every row is split over several programs, so that one row alone occupies the whole GPU. Each leaves
the largest logit and the weight of its blocks; the last program of a row to finish draws the block, reads it again
and draws the token. Without filters that is one launch, which reads the logits once. With filters the largest logits
come first (`_maxima_kernel`), then `sampling_filters` turns top-k and top-p into a threshold, and then only blocks
that hold a token to keep are read.

No sum depends on the split or on the order in which programs run, and ties go to the lowest id. Nothing waits for the
host and every launch has a fixed shape. Few things make the compiler start again (numbers that change with the batch
do not): the dtype, whether there are filters, and whether the kernel starts before its predecessor has ended.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.sample import check_sample
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.device_math import ex2, exp, log, wide
from nanovllm.kernels.triton.early_start import launched_early
from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2
from nanovllm.kernels.triton.sampling.filters import filter_thresholds
from nanovllm.kernels.triton.sampling.keys import (
    BINS,
    COUNTERS,
    GROUP,
    KEY_SHIFT,
    order_key,
    pair_sum,
    row_best,
    split,
)
from nanovllm.kernels.triton.sampling.philox import exponential, philox_four

# Blocks that a program takes at once: each is a warp's, of which every thread loads eight columns.
_TILE = 16
_FILTERED_TILE = 8  # what is skipped together if all of it is filtered out
_WARPS = 8
_PROGRAMS = 4  # on each multiprocessor, all resident at once


@triton.jit
def _load_blocks(logits, block, vocab_size, wanted):
    """The logits of some blocks, -inf beyond the vocabulary and where not wanted: [len(block), GROUP]."""
    col = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(logits + col, (col < vocab_size) & wanted, other=-float("inf"))


@triton.jit
def _weights(x, largest, t):
    """The sums of e^((x - largest) / t) over rows of x [n, GROUP]: [n]. t > 0, else something."""
    largest = tl.maximum(largest, -3.4028234663852886e38)  # -inf - -inf is NaN
    scale = tl.minimum(tl.div_rn(1.4426950408889634, t), 3.4028234663852886e38)
    return pair_sum(ex2((x - largest[:, None]) * scale))


@triton.jit
def _kept(x, col, best, t, threshold, last_id, least, SHIFT: tl.constexpr):
    """Which logits pass the filters of their row."""
    key = order_key(x) >> SHIFT
    keep = (key > threshold) | ((key == threshold) & (col <= last_id))
    if least > 0.0:
        keep = keep & (exp(tl.div_rn(x - best, t)) >= least)
    return keep


@triton.jit
def _pick(
    logits, maxima, weights, STEP: tl.constexpr, t, seed, position, vocab_size, blocks, threshold, last_id, least,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token of one row; the pointers are to its logits and to its blocks' maxima and weights, STEP apart."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c1 = position.to(tl.uint32)
    lane = tl.arange(0, GROUP)
    PARTS: tl.constexpr = (BLOCKS + GROUP - 1) // GROUP
    # All loads first, since each takes as long as the rest of this function. Past L1: other programs have written
    # these.
    largest = ()
    weight = ()
    weighed = tl.where(t == 0.0, 0, blocks)  # a greedy row may have no weights
    top = tl.full([GROUP], -3.4028234663852886e38, tl.float32)  # finite, or a row of nothing but -inf turns into NaN
    for part in tl.static_range(PARTS):
        index = lane + part * GROUP
        m = tl.load(maxima + index * STEP, index < blocks, other=-float("inf"), cache_modifier=".cg")
        w = tl.load(weights + index * STEP, index < weighed, other=0.0, cache_modifier=".cg")
        largest = largest + (m,)
        weight = weight + (w,)
        top = tl.maximum(top, m)
    best = tl.max(top, 0)
    score = tl.full([GROUP], -float("inf"), tl.float32)
    block = tl.zeros([GROUP], tl.int32)
    for part in tl.static_range(PARTS):
        if part % 4 == 0:
            words = philox_four((lane + part // 4 * GROUP).to(tl.uint32) | 0x80000000, c1, k0, k1)
        s = tl.div_rn(largest[part] - best, t) + log(tl.div_rn(weight[part], exponential(words[part % 4])))
        s = tl.where(t == 0.0, largest[part], s)
        # Blocks rise, so a lane keeps the lowest of equal ones. Comparisons with NaN are false: it is never kept.
        block = tl.where(s > score, lane + part * GROUP, block)
        score = tl.where(s > score, s, score)
    block = tl.min(tl.where(score == tl.max(score, 0), block, 0x7FFFFFFF), 0)
    col = block * GROUP + lane
    x = tl.load(logits + col, col < vocab_size, other=-float("inf")).to(tl.float32)
    w0, w1, w2, w3 = philox_four((block // 4 * GROUP + lane).to(tl.uint32), c1, k0, k1)
    part = block % 4
    word = tl.where(part < 2, tl.where(part == 0, w0, w1), tl.where(part == 2, w2, w3))
    s = tl.div_rn(x - best, t) - log(exponential(word))
    if FILTERED:
        s = tl.where(_kept(x, col, best, t, threshold, last_id, least, SHIFT), s, -float("inf"))
    s = tl.where(t == 0.0, x, s)
    s = tl.where(s == s, s, -float("inf"))
    return block * GROUP + tl.min(tl.where(s == tl.max(s, 0), lane, GROUP), 0)


@triton.jit(
    do_not_specialize=["tiles_per_program", "pieces"],
    do_not_specialize_on_alignment=["temperature", "seeds", "positions"],
)
def _draw_kernel(
    logits, temperature, seeds, positions, sums, counters, out,
    vocab_size, stride, blocks, tiles_per_program, pieces,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    logits += row.to(tl.int64) * stride
    sums += row * blocks * 2
    first = tl.program_id(1) * tiles_per_program * TILE
    end = first + tiles_per_program * TILE
    block = first + tl.arange(0, TILE)
    ahead = _load_blocks(logits, block, vocab_size, (block < end)[:, None])
    for _ in range(tiles_per_program):
        x = wide(ahead)
        ahead = _load_blocks(logits, block + TILE, vocab_size, (block + TILE < end)[:, None])
        largest = tl.max(x, 1)
        # Together, since a store moves its values to other threads: two barriers instead of four.
        found = tl.join(largest, _weights(x, largest, t))
        tl.store(sums + block[:, None] * 2 + tl.arange(0, 2)[None, :], found, (block < blocks)[:, None])
        block += TILE
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == pieces - 1:
        tl.store(counters + row, 0)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        token = _pick(
            logits, sums, sums + 1, 2, t, seed, position, vocab_size, blocks, 0, 0, 0.0, False, 0, BLOCKS
        )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["tiles_per_program", "has_bins"])
def _maxima_kernel(
    logits, maxima, counters, bins, vocab_size, stride, blocks, tiles_per_program, has_bins,
    TILE: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if tl.program_id(1) == 0:
        # What later launches count with; see `sampling_filters`.
        tl.store(counters + row * COUNTERS + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
        if has_bins != 0:
            tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
    logits += row.to(tl.int64) * stride
    block = tl.program_id(1) * tiles_per_program * TILE + tl.arange(0, TILE)
    for _ in range(tiles_per_program):
        x = wide(_load_blocks(logits, block, vocab_size, (block < blocks)[:, None]))
        tl.store(maxima + row * blocks + block, tl.max(x, 1), block < blocks)
        block += TILE


@triton.jit(
    do_not_specialize=["tiles_per_program", "pieces", "has_threshold", "has_min_p"],
    do_not_specialize_on_alignment=["temperature", "min_p", "seeds", "positions"],
)
def _filtered_draw_kernel(
    logits, temperature, min_p, seeds, positions, maxima, thresholds, weights, counters, out,
    vocab_size, stride, blocks, tiles_per_program, pieces, has_threshold, has_min_p,
    SHIFT: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    threshold = tl.full([], -0x80000000, tl.int64).to(tl.int32)
    last_id = vocab_size + tl.zeros([], tl.int32)
    least = tl.zeros([], tl.float32)
    if has_threshold != 0:
        threshold = tl.load(thresholds + row * 2)
        last_id = tl.load(thresholds + row * 2 + 1)
    if has_min_p != 0:
        least = tl.load(min_p + row)
    logits += row.to(tl.int64) * stride
    maxima += row * blocks
    weights += row * blocks
    if t != 0.0:
        best = row_best(maxima, blocks, BLOCKS)
        block = tl.program_id(1) * tiles_per_program * TILE + tl.arange(0, TILE)
        for _ in range(tiles_per_program):
            # What is kept of a block includes its largest, or one that equals it.
            largest = tl.load(maxima + block, block < blocks, other=-float("inf"))
            some = _kept(largest, block * GROUP, best, t, threshold, last_id, least, SHIFT)
            weight = tl.zeros([TILE], tl.float32)
            if tl.max(some.to(tl.int32), 0) > 0:
                x = wide(_load_blocks(logits, block, vocab_size, some[:, None]))
                col = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                x = tl.where(_kept(x, col, best, t, threshold, last_id, least, SHIFT), x, -float("inf"))
                weight = _weights(x, largest, t)
            tl.store(weights + block, weight, block < blocks)
            block += TILE
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == pieces - 1:
        tl.store(counters + row, 0)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        token = _pick(
            logits, maxima, weights, 1, t, seed, position, vocab_size, blocks, threshold, last_id, least, True, SHIFT,
            BLOCKS
        )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None,
    min_p: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The op `sample`. Rows of logits may have any stride; a stride within a row, or in a parameter, is copied away."""
    check_sample(logits, temperature, top_p, min_p)
    rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    blocks = cdiv(vocab_size, GROUP.value)
    padded_blocks = next_power_of_2(blocks)
    sizes = (vocab_size, logits.stride(0), blocks)
    pieces, per_program = split(cdiv(blocks, _TILE), logits, _PROGRAMS)
    arrivals = arrival_counters(device, rows)
    early = launched_early(logits, rows)
    launch = {"num_warps": _WARPS, "launch_pdl": early}
    if top_k is None and top_p is None and min_p is None:
        sums = torch.empty((rows, blocks, 2), dtype=torch.float32, device=device)
        _draw_kernel[(rows, pieces)](
            logits, temperature, seeds, positions, sums, arrivals, out, *sizes, per_program, pieces,
            _TILE, padded_blocks, early, enable_fp_fusion=False, **launch,
        )  # fmt: skip
        return out
    maxima = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    weights = torch.empty_like(maxima)
    counters = torch.empty((rows, COUNTERS.value), dtype=torch.int32, device=device)
    bins = torch.empty((rows, BINS), dtype=torch.int64, device=device)
    has_p = int(top_p is not None)
    _maxima_kernel[(rows, pieces)](
        logits, maxima, counters, bins, *sizes, per_program, has_p, _TILE, BINS, early, **launch
    )  # fmt: skip
    thresholds = counters
    has_threshold = top_k is not None or top_p is not None
    if has_threshold:
        thresholds = filter_thresholds(logits, temperature, top_k, top_p, maxima, counters, bins)
    pieces, per_program = split(cdiv(blocks, _FILTERED_TILE), logits, _PROGRAMS)
    _filtered_draw_kernel[(rows, pieces)](
        logits, temperature, temperature if min_p is None else min_p.contiguous(), seeds, positions, maxima, thresholds,
        weights, arrivals, out, *sizes, per_program, pieces, int(has_threshold), int(min_p is not None),
        KEY_SHIFT[logits.dtype], _FILTERED_TILE, padded_blocks, early, enable_fp_fusion=False, **launch,
    )  # fmt: skip
    return out
