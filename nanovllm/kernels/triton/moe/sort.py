"""Sorting of (token, expert) pairs by expert, on the device: a stable counting sort, and a table of blocks of rows.

Sizes depend on the numbers of tokens, choices and experts alone, so that a CUDA graph can hold it, and the host never
reads how many tokens an expert has. Nothing is added atomically to memory: the order is the same every time.

Pair p is choice p % top_k of token p // top_k. A pair whose expert does not exist is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2

STEP = 128
"""Pairs that a program ranks at once: it compares each with each."""
MAX_PROGRAMS = 64
"""A program reads the counts of all programs."""
_BLOCKS = 32
"""Blocks of rows whose entries a program looks up at once."""


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts, cut into blocks of which each has one expert.

    Attributes:
        order: [num_pairs] int32: pairs by expert; of one expert, by number.
        blocks: [3, max_blocks] int32: the expert of each block, or -1 behind the last block; its first row, and the end
            of its expert's rows. Rows are places in `order`.
    """

    order: torch.Tensor
    blocks: torch.Tensor


@triton.jit
def _experts_of(experts, pair, num_pairs, num_experts):
    """The experts of pairs; num_experts for those that do not exist."""
    expert = tl.load(experts + pair, pair < num_pairs, other=num_experts)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)


# Neither kernel is specialised on counts of tokens: that would compile it again in the middle of serving.
@triton.jit(do_not_specialize=["num_pairs", "steps"])
def count_kernel(
    experts, counts, num_pairs, num_experts, steps, STEP: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr
):
    """counts[program]: the pairs of each expert among the program's steps * STEP pairs; those without come last."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    total = tl.zeros([BINS], tl.int32)
    for step in range(steps):
        pair = (program * steps + step) * STEP + tl.arange(0, STEP)
        total += tl.histogram(_experts_of(experts, pair, num_pairs, num_experts), BINS)
    tl.store(counts + program * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["num_pairs", "steps", "max_blocks"])
def sort_kernel(
    experts,  # [num_pairs] int32
    counts,  # [programs, BINS] of `count_kernel`; not read if ONE
    order, blocks,  # as in `SortedPairs`
    num_pairs, num_experts, steps, max_blocks,
    ROWS: tl.constexpr,  # of a block
    STEP: tl.constexpr, BINS: tl.constexpr, BLOCKS: tl.constexpr,
    ONE: tl.constexpr,  # one program, with one step
    PDL: tl.constexpr,
):  # fmt: skip
    """Every program places its steps * STEP pairs, and writes a part of the table of blocks."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    if ONE:
        total = tl.histogram(_experts_of(experts, tl.arange(0, STEP), num_pairs, num_experts), BINS)
    else:
        total = tl.zeros([BINS], tl.int32)
        for other in range(programs):
            count = tl.load(counts + other * BINS + bins)
            total += count
            before += tl.where(other < program, count, 0)
    start = tl.cumsum(total, 0) - total

    i = tl.arange(0, STEP)
    place = start + before
    for step in range(steps):
        pair = (program * steps + step) * STEP + i
        expert = _experts_of(experts, pair, num_pairs, num_experts)
        earlier = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + tl.gather(place, expert, 0) + rank, pair, expert < num_experts)
        if not ONE:
            place += tl.histogram(expert, BINS)

    own = tl.where(bins < num_experts, (total + ROWS - 1) // ROWS, 0)  # blocks of an expert
    ends = tl.cumsum(own, 0)
    for first in range(program * BLOCKS, max_blocks, programs * BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        expert = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)  # BINS behind the last block
        live = expert < num_experts
        expert = tl.where(live, expert, num_experts)
        row = tl.gather(start, expert, 0) + (block - tl.gather(ends - own, expert, 0)) * ROWS
        inside = block < max_blocks
        tl.store(blocks + block, tl.where(live, expert, -1), inside)
        tl.store(blocks + max_blocks + block, row, inside)
        tl.store(blocks + 2 * max_blocks + block, tl.gather(start + total, expert, 0), inside)


def max_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks of `rows` pairs: as many experts as possible have one pair, all other pairs fill blocks."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // rows


def sort_pairs(experts: torch.Tensor, num_experts: int, rows: int) -> SortedPairs:
    """Sort the pairs of experts [num_tokens, top_k] int32, contiguous and not empty, into blocks of `rows`."""
    num_pairs = experts.numel()
    device, pdl = experts.device, has_dependent_launch(experts.device)
    bins = next_power_of_2(num_experts + 1)
    steps = cdiv(num_pairs, STEP * MAX_PROGRAMS)
    programs = cdiv(num_pairs, STEP * steps)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    blocks = torch.empty((3, max_blocks(num_pairs, num_experts, rows)), dtype=torch.int32, device=device)
    counts = order
    if programs > 1:
        counts = torch.empty((programs, bins), dtype=torch.int32, device=device)
        count_kernel[(programs,)](
            experts, counts, num_pairs, num_experts, steps, STEP, bins, pdl, num_warps=4, launch_pdl=pdl
        )
    sort_kernel[(programs,)](
        experts, counts, order, blocks, num_pairs, num_experts, steps, blocks.shape[1], rows, STEP, bins, _BLOCKS,
        programs == 1, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return SortedPairs(order, blocks)
