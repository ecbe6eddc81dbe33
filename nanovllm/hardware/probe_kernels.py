"""Triton kernels that measure a GPU: a copy, a read, a chain of dependent loads, and a kernel that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------- copying


@dataclass(frozen=True)
class CopyPlan:
    """How to launch a copy.

    Attributes:
        loads: loads of 16 bytes that a thread has in flight.
        warps: warps of a program.
        early: launch the kernel before its predecessor has ended, and let its successor start early too (programmatic
            dependent launch), as small elementwise kernels are launched.
        stream: keep neither source nor target in the cache.
    """

    loads: int
    warps: int
    early: bool
    stream: bool = False


@triton.jit
def _copy_kernel(
    source, target, num_bytes, BLOCK: tl.constexpr, TAIL: tl.constexpr, DEPENDENT: tl.constexpr, STREAM: tl.constexpr
):
    """BLOCK: 4-byte words of a program. TAIL: 16 does not divide num_bytes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    # A multiple of 4 in the compiler's eyes too, so that masked loads keep their 16 bytes.
    mask = col < num_bytes // 16 * 4 - start
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    words = source.to(tl.pointer_type(tl.int32)) + start + col
    loaded = tl.load(words, mask, eviction_policy="evict_first" if STREAM else "")
    words = target.to(tl.pointer_type(tl.int32)) + start + col
    tl.store(words, loaded, mask, cache_modifier=".cs" if STREAM else "")
    if TAIL:
        if tl.program_id(0) == 0:
            place = num_bytes // 16 * 16 + tl.arange(0, 16)
            last = tl.load(source.to(tl.pointer_type(tl.int8)) + place, place < num_bytes)
            tl.store(target.to(tl.pointer_type(tl.int8)) + place, last, place < num_bytes)


def copy(target: torch.Tensor, source: torch.Tensor, plan: CopyPlan) -> None:
    """target = source. Both are contiguous, aligned to 16 bytes, and have the same number of bytes.

    Not `Tensor.copy_`: in a CUDA graph that is a node of the driver, whose time jumps by half with size and alignment.

    Raises:
        ValueError: a tensor is not contiguous, not aligned, or of another size.
    """
    for name, t in (("target", target), ("source", source)):
        if not t.is_contiguous() or t.data_ptr() % 16 or t.nbytes != source.nbytes:
            raise ValueError(f"{name}: expected {source.nbytes} contiguous bytes, aligned to 16")
    block = 4 * 32 * plan.loads * plan.warps
    if source.nbytes:
        _copy_kernel[(-(-source.nbytes // (4 * block)),)](
            source, target, source.nbytes, block, source.nbytes % 16 != 0, plan.early, plan.stream,
            num_warps=plan.warps, launch_pdl=plan.early,
        )  # fmt: skip


def copy_plans(dependent_launch: bool) -> list[CopyPlan]:
    """The plans to try: grids and items a thread as those of elementwise kernels.

    Args:
        dependent_launch: whether the GPU has programmatic dependent launch; then early launches are tried too.
    """
    launches = (False, True) if dependent_launch else (False,)
    return [CopyPlan(loads, 4, early) for loads in (1, 2, 4) for early in launches]


# ------------------------------------------------------------------------------------------------------------- reading

READ_BLOCK = 4096


@triton.jit
def read_kernel(source, out, num_blocks, passes, BLOCK: tl.constexpr):
    """Read `num_blocks` blocks `passes` times; each program writes one sum, so that no load is left out."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(passes):
        # Another part each time: what a multiprocessor read last lies in its L1 cache.
        block = (program + i * 7) % programs
        while block < num_blocks:
            total += tl.load(source + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
            block += programs
    tl.store(out + program, tl.sum(total))


def read_time(source: torch.Tensor, shortest: Callable[[Callable[[], Any]], float], passes: int = 1) -> float:
    """Seconds to read a float32 tensor on a CUDA device `passes` times. A rest of less than one block is not read.

    Args:
        shortest: gives the shortest time of several calls of a function.
    """
    num_blocks = source.numel() // READ_BLOCK
    multiprocessors = torch.cuda.get_device_properties(source.device).multi_processor_count
    best = float("inf")
    for per_multiprocessor in (4, 8, 16):
        programs = min(num_blocks, multiprocessors * per_multiprocessor)
        out = torch.empty(programs, device=source.device)

        def read(programs: int = programs, out: torch.Tensor = out) -> None:
            read_kernel[programs,](source, out, num_blocks, passes, BLOCK=READ_BLOCK, num_warps=8)

        best = min(best, shortest(read))
    return best


# ------------------------------------------------------------------------------------------------------------- latency

_LINE = 32
"""int32 elements of 128 bytes, a cache line: no two steps share one."""


@triton.jit
def chase_kernel(links, ends, start, steps):
    """Follow `steps` links: the address of each load is what the load before it returned."""
    at = start
    for _ in range(steps):
        # Past the L1 cache, which would keep what a small ring needs.
        at = tl.load(links + at, cache_modifier=".cg")
    tl.store(ends, at)


def ring(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(links, order): an int32 tensor of `num_bytes` whose elements at multiples of 32 form one ring, and its random
    order.

    links[order[i]] is order[i + 1], and the last one leads to the first.
    """
    lines = num_bytes // (4 * _LINE)
    if lines < 2:
        raise ValueError(f"num_bytes: expected at least {8 * _LINE}, not {num_bytes}")
    order = (torch.randperm(lines, device=device) * _LINE).to(torch.int32)
    links = torch.zeros(lines * _LINE, dtype=torch.int32, device=device)
    links[order.long()] = order.roll(-1)
    return links, order


def chase_seconds(
    num_bytes: int, steps: int, device: torch.device, shortest: Callable[[Callable[[], None]], float]
) -> float:
    """Seconds from a load to the next one that needs its result, in a ring of `num_bytes`.

    A ring well within the L2 cache stays there. Of a ring well beyond it, each call follows a part that no call
    followed before.

    Args:
        steps: loads of a call. A second kind of call makes twice as many; the difference leaves out the launch.
        shortest: gives the shortest time of several calls of a function.
    """
    links, order = ring(num_bytes, device)
    end = torch.empty(1, dtype=torch.int32, device=device)
    starts = order[:: 2 * steps].tolist()
    calls = 0

    def follow(count: int) -> None:
        nonlocal calls
        chase_kernel[(1,)](links, end, starts[calls % len(starts)], count, num_warps=1)
        calls += 1

    for _ in range(min(8, len(starts)) + 2):
        follow(2 * steps)  # compiled, and a small ring brought into the cache
    short = shortest(lambda: follow(steps))
    return (shortest(lambda: follow(2 * steps)) - short) / steps


# ------------------------------------------------------------------------------------------------------------- nothing


@triton.jit
def _empty_kernel():
    pass


def launch_empty() -> None:
    """Launch one program of one warp that does nothing on the current CUDA device: the least that a launch costs."""
    _empty_kernel[(1,)](num_warps=1)
