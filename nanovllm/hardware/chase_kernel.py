"""The latency of a load, by following pointers: each load's address is what the load before it returned."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

_LINE = 32
"""int32 elements of 128 bytes, a cache line: no two steps share one."""


@triton.jit
def _chase(links, ends, start, steps):
    at = start
    for _ in range(steps):
        # Past the L1 cache, which would keep what a small ring needs.
        at = tl.load(links + at, cache_modifier=".cg")
    tl.store(ends, at)


def ring(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(links, order): an int32 tensor of `num_bytes` whose elements at multiples of 32 form one ring in random order, and that order.

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
    num_bytes: int, steps: int, device: torch.device, least: Callable[[Callable[[], None]], float]
) -> float:
    """Seconds from a load to the next one that needs its result, in a ring of `num_bytes`.

    A ring well within the L2 cache is followed there; of one well beyond it, each call follows a part that no call followed before.

    Args:
        steps: loads of a call; a second kind of call makes twice as many, and the difference leaves out the launch.
        least: the shortest time of a call that is made several times.
    """
    links, order = ring(num_bytes, device)
    end = torch.empty(1, dtype=torch.int32, device=device)
    starts = order[:: 2 * steps].tolist()
    calls = 0

    def follow(count: int) -> None:
        nonlocal calls
        _chase[(1,)](links, end, starts[calls % len(starts)], count, num_warps=1)
        calls += 1

    for _ in range(min(8, len(starts)) + 2):
        follow(2 * steps)  # compiled, and a small ring brought into the cache
    short = least(lambda: follow(steps))
    return (least(lambda: follow(2 * steps)) - short) / steps
