"""A kernel that does nothing but read, to measure how fast memory and cache can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _read(source, out, num_blocks, passes, BLOCK: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(passes):
        # Another part each time: what a multiprocessor read last lies in its L1 cache.
        block = (program + i * 7) % programs
        while block < num_blocks:
            total += tl.load(source + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
            block += programs
    tl.store(out + program, tl.sum(total))


def read_time(source: torch.Tensor, least: Callable[[Callable[[], Any]], float], passes: int = 1) -> float:
    """Seconds to read a float32 tensor on a CUDA device `passes` times; `least` times a call. Its end may be left out."""
    num_blocks = source.numel() // _BLOCK
    multiprocessors = torch.cuda.get_device_properties(source.device).multi_processor_count
    best = float("inf")
    for per_multiprocessor in (4, 8, 16):
        programs = min(num_blocks, multiprocessors * per_multiprocessor)
        out = torch.empty(programs, device=source.device)
        best = min(best, least(lambda: _read[programs,](source, out, num_blocks, passes, BLOCK=_BLOCK, num_warps=8)))  # noqa: B023
    return best
