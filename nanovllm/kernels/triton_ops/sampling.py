"""Sampling one token per row, the same token as the op's reference draws.

The vocabulary of every row is split over several programs, so that one row alone occupies the whole GPU:

1. `_row_max_kernel`: maxima of groups of logits. Every later program takes the row's largest from them, and they tell
   which blocks of a row it need not look at.
2. Only with top-k or top-p: `sampling_filters` turns the filters of a row into a threshold on its logits.
3. `_draw_kernel`: each program scores its piece of a row, the last program of a row to finish picks the best score.

No float is summed over the vocabulary, sums are of integers, and ties go to the lowest id; so the result does not depend
on the split or on the order in which programs run. Nothing waits for the host and every launch has a fixed shape.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.sample import QUARTER
from nanovllm.kernels.triton_ops._launch import cdiv, launched_early, next_power_of_2, num_sms
from nanovllm.kernels.triton_ops._math import exp, log, log1p
from nanovllm.kernels.triton_ops.philox import philox_four, uniform
from nanovllm.kernels.triton_ops.sampling_filters import filter_thresholds
from nanovllm.kernels.triton_ops.sampling_keys import BINS, COUNTERS, GROUP, KEY_SHIFT, block_max, order_key, row_best

BLOCK = 4 * QUARTER
_WARPS = 4
# The score of the largest logit is at least -log(-log(2^-24)) > -2.9, and noise is at most 33 log(2) < 22.9: a token
# whose logarithmic weight is below -26 can never win, and needs no random number. (-26.5 where it is approximate.)
_LEAST_BEST = tl.constexpr(-2.9)
_HOPELESS = tl.constexpr(-26.5)


@triton.jit
def _row_max_kernel(
    logits, temperature, maxima, counters, bins, vocab_size, stride, groups, blocks_per_program,
    BLOCK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    piece = tl.program_id(1)
    PER_BLOCK: tl.constexpr = BLOCK // GROUP
    if piece == 0:
        # What later launches count with; see `sampling_filters`.
        tl.store(counters + row * COUNTERS + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
        if BINS:
            tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
    if tl.load(temperature + row) != 0.0:  # a greedy row needs no maximum in advance
        logits += row.to(tl.int64) * stride
        for i in range(blocks_per_program):
            block = piece * blocks_per_program + i
            group = block * PER_BLOCK + tl.arange(0, PER_BLOCK)
            col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(logits + col, col < vocab_size, other=-float("inf")).to(tl.float32)
            tl.store(maxima + row * groups + group, tl.max(x, 1), group < groups)


@triton.jit
def _draw_kernel(
    logits, temperature, min_p, seeds, positions, maxima, thresholds, counters, best_scores, best_columns, out,
    vocab_size, stride, groups, blocks_per_program, pieces,
    THRESHOLDS: tl.constexpr, MIN_P: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    piece = tl.program_id(1)
    t = tl.load(temperature + row)
    logits += row.to(tl.int64) * stride
    QUARTER: tl.constexpr = BLOCK // 4
    lane = tl.arange(0, QUARTER)
    score = tl.full([QUARTER], -float("inf"), tl.float32)
    column = tl.zeros([QUARTER], tl.int32)
    first = piece * blocks_per_program * BLOCK
    if t == 0.0:
        for i in range(blocks_per_program):
            for quarter in tl.static_range(4):
                col = first + i * BLOCK + quarter * QUARTER + lane
                x = tl.load(logits + col, col < vocab_size, other=-float("inf")).to(tl.float32)
                # Columns rise, so a lane keeps the lowest of equal ones. Comparisons with NaN are false: it is never kept.
                column = tl.where(x > score, col, column)
                score = tl.where(x > score, x, score)
    else:
        best = row_best(maxima, row, groups, GROUPS)
        seed = tl.load(seeds + row)
        k0 = seed.to(tl.uint32)
        k1 = (seed >> 32).to(tl.uint32)
        position = tl.load(positions + row).to(tl.uint32)
        if THRESHOLDS:
            threshold = tl.load(thresholds + row * 2)
            last_id = tl.load(thresholds + row * 2 + 1)
        if MIN_P:
            least = tl.load(min_p + row)
        per_t = 1.0 / tl.maximum(t, 1e-37)  # finite; too small is safe below
        bound = tl.full([], _LEAST_BEST, tl.float32)  # some token's score is at least this
        for i in range(blocks_per_program):
            # What is exact is slow, so it is done only where an approximation leaves some token of the block a chance: first
            # by the block's largest logit, then by each token's random number.
            block = piece * blocks_per_program + i
            largest = block_max(maxima, row, block, groups, BLOCK)
            chance = (largest - best) * per_t >= _HOPELESS
            if THRESHOLDS:
                chance = chance & ((order_key(largest) >> SHIFT) >= threshold)
            if MIN_P:
                chance = chance & (tl.exp((largest - best) * per_t) >= least * 0.999)
            if chance:
                words = philox_four((block * QUARTER + lane).to(tl.uint32), position, k0, k1)
                columns = ()
                values = ()
                kept = ()
                some = lane < 0
                for quarter in tl.static_range(4):
                    col = block * BLOCK + quarter * QUARTER + lane
                    x = tl.load(logits + col, col < vocab_size, other=-float("inf")).to(tl.float32)
                    # log1p(-u) <= -u, so the score is at most log_weight - log(u).
                    keep = uniform(words[quarter]) <= tl.exp((x - best) * per_t - bound) * 1.01
                    if THRESHOLDS:
                        key = order_key(x) >> SHIFT
                        keep = keep & ((key > threshold) | ((key == threshold) & (col <= last_id)))
                    some = some | keep
                    columns = columns + (col,)
                    values = values + (x,)
                    kept = kept + (keep,)
                if tl.max(some.to(tl.int32), 0) > 0:
                    for quarter in tl.static_range(4):
                        keep = kept[quarter]
                        log_weight = tl.div_rn(values[quarter] - best, t)
                        if MIN_P:
                            keep = keep & (exp(log_weight) >= least)
                        gumbel = -log(-log1p(-uniform(words[quarter])))
                        s = tl.where(keep, log_weight + gumbel, -float("inf"))
                        column = tl.where(s > score, columns[quarter], column)
                        score = tl.where(s > score, s, score)
                    bound = tl.maximum(bound, tl.max(score, 0))
    top = tl.max(score, 0)
    winner = tl.min(tl.where(score == top, column, 0x7FFFFFFF), 0)
    if PIECES == 1:
        tl.store(out + row, winner.to(tl.int64))
    else:
        tl.store(best_scores + row * pieces + piece, top)
        tl.store(best_columns + row * pieces + piece, winner)
        tl.debug_barrier()
        if tl.atomic_add(counters + row * COUNTERS, 1, sem="acq_rel") == pieces - 1:
            index = tl.arange(0, PIECES)
            inside = index < pieces
            scores = tl.load(best_scores + row * pieces + index, inside, other=-float("inf"), cache_modifier=".cg")
            columns = tl.load(best_columns + row * pieces + index, inside, other=0x7FFFFFFF, cache_modifier=".cg")
            tl.store(out + row, tl.min(tl.where(scores == tl.max(scores, 0), columns, 0x7FFFFFFF), 0).to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The op `sample`. Rows of logits may have any stride; a stride within a row, or in a parameter, is copied away."""
    rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    min_p = None if min_p is None else min_p.contiguous()
    # About eight programs of four warps on each multiprocessor, all resident at once.
    blocks = cdiv(vocab_size, BLOCK)
    per_program = cdiv(blocks, max(1, 8 * num_sms(logits) // rows))
    pieces = cdiv(blocks, per_program)
    filtered = top_k is not None or top_p is not None
    groups = cdiv(vocab_size, GROUP.value)
    maxima = torch.empty((rows, groups), dtype=torch.float32, device=device)
    counters = torch.empty((rows, COUNTERS.value), dtype=torch.int32, device=device)
    bins = counters if top_p is None else torch.empty((rows, BINS), dtype=torch.int64, device=device)
    early = launched_early(logits, rows)
    _row_max_kernel[(rows, pieces)](
        logits, temperature, maxima, counters, bins, vocab_size, logits.stride(0), groups, per_program,
        BLOCK, 0 if top_p is None else BINS, early, num_warps=_WARPS, launch_pdl=early,
    )  # fmt: skip
    thresholds = counters
    if filtered:
        thresholds = filter_thresholds(
            logits, temperature, top_k, top_p, maxima, counters, bins, pieces, per_program, BLOCK
        )
    best_scores = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    best_columns = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    _draw_kernel[(rows, pieces)](
        logits, temperature, temperature if min_p is None else min_p, seeds, positions, maxima, thresholds, counters,
        best_scores, best_columns, out, vocab_size, logits.stride(0), groups, per_program, pieces,
        filtered, min_p is not None, KEY_SHIFT[logits.dtype], BLOCK, next_power_of_2(groups), next_power_of_2(pieces),
        early, num_warps=_WARPS, enable_fp_fusion=False, launch_pdl=early,
    )  # fmt: skip
    return out
