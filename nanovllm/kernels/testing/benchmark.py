"""Timing of kernels: one call from Python, or many in a CUDA graph."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nanovllm.hardware.cuda_graph_memory import GraphMemory, recover_generator
from nanovllm.kernels.op.availability import triton_support


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        if len(seconds) == 1:
            return Timing(seconds[0], seconds[0], seconds[0])
        fifths = statistics.quantiles(seconds, n=5, method="inclusive")
        return Timing(statistics.median(seconds), fifths[0], fifths[3])


def benchmark_kernel(
    fn: Callable[..., Any],
    *args: Any,
    warmup: int = 20,
    iters: int = 100,
    cold_l2: bool = True,
    verbose: bool = False,
    **kwargs: Any,
) -> float:
    """The median time of `fn(*args, **kwargs)` in seconds.

    On a GPU: CUDA events around every call, on the current stream. Before each call a buffer of several times the L2 cache
    is written, so that inputs come from device memory, and so that the device is busy while the host launches: launch
    overhead shows only where a call launches more than the device needs time for. On a CPU: a wall clock.

    Args:
        warmup: calls before the timed ones (compilation, autotuning, allocation).
        iters: timed calls.
        cold_l2: False: leave in the cache what the call before left there.
        verbose: also print the 20th percentile, the median and the 80th.

    Raises:
        ValueError: `iters` is below 1 or `warmup` is negative.
    """
    timing = time_kernel(fn, *args, warmup=warmup, iters=iters, cold_l2=cold_l2, **kwargs)
    if verbose:
        name = getattr(fn, "__name__", type(fn).__name__)
        low, mid, high = (1e6 * t for t in (timing.p20, timing.median, timing.p80))
        print(f"{name}: p20 {low:.2f} us, median {mid:.2f} us, p80 {high:.2f} us over {iters} calls")
    return timing.median


def time_kernel(
    fn: Callable[..., Any], *args: Any, warmup: int = 20, iters: int = 100, cold_l2: bool = True, **kwargs: Any
) -> Timing:
    """`benchmark_kernel` with its percentiles."""
    if iters < 1 or warmup < 0:
        raise ValueError(f"expected iters >= 1 and warmup >= 0, not iters={iters}, warmup={warmup}")
    tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
    device = next((t.device for t in tensors), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for _ in range(warmup):
        fn(*args, **kwargs)
    if device.type != "cuda":
        seconds = []
        for _ in range(iters):
            start = time.perf_counter()
            fn(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
        return Timing.of(seconds)
    with torch.cuda.device(device):
        eviction = torch.empty(max(256 << 20, 4 * l2_bytes(device)), dtype=torch.int8, device=device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iters)]
        for start, end in events:
            if cold_l2:
                eviction.zero_()
            start.record()
            fn(*args, **kwargs)
            end.record()
        torch.cuda.synchronize(device)
        return Timing.of([start.elapsed_time(end) / 1e3 for start, end in events])


def time_in_graph(calls: Sequence[Callable[[], Any]], replays: int = 20) -> Timing:
    """Seconds per call of `calls`, run one after the other in a CUDA graph: what the device needs, without launches by the host.

    Give each call inputs of its own, more than the L2 cache holds in all, and they come from device memory.
    """
    device = torch.cuda.current_device()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*calls, *calls)[: max(3, len(calls))]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, memory = torch.cuda.CUDAGraph(), GraphMemory()
    try:
        with torch.cuda.graph(graph, memory.handle, side):  # where the calls ran: kernels keep counters for each stream
            for call in calls:
                call()
    except BaseException:
        memory.give_up(side.device)
        recover_generator(side.device)
        raise
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize(device)
    return Timing.of([a.elapsed_time(b) / 1e3 / len(calls) for a, b in zip(events, events[1:])])


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


def copies(device: torch.device) -> list[Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Functions of (target, source), contiguous and aligned to 16 bytes, that copy; the fastest is what others are compared with.

    Kernels of our own, launched as our elementwise ops are; `copy_` only where Triton does not run: in a CUDA graph it is a node of the
    driver's, which takes 1.3 to 1.6 times as long for some sizes as for others beside them.
    """
    if triton_support(device) is not None:
        return [torch.Tensor.copy_]
    from nanovllm.kernels.triton.rows.copy import copy, copy_plans

    return [functools.partial(copy, plan=plan) for plan in copy_plans(device)]


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on a CUDA device, read and written bytes counted: the roof of an elementwise kernel."""
    source = torch.empty(1 << 30, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    # Outside of a graph `copy_` is no such node, and one more way to reach the roof.
    ways = dict.fromkeys((torch.Tensor.copy_, *copies(device)))
    return 2 * source.numel() / min(time_kernel(way, target, source, warmup=3, iters=20).median for way in ways)


@cache
def copy_time(device: torch.device, num_bytes: int) -> float:
    """Seconds of a copy that reads and writes `num_bytes` in all, timed as kernels are: in a CUDA graph, from device memory.

    Of 10 or 100 MB it takes longer than `copy_bandwidth` allows, as any kernel does that has to start, and to run out, in that time.
    """
    size = num_bytes // 2
    pairs = max(2, -(-5 * l2_bytes(device) // 2 // max(1, size)))
    with torch.cuda.device(device):
        sources = torch.empty(pairs, -(-size // 16) * 16, dtype=torch.int8, device=device).random_()
        sets = [(b[:size], a[:size]) for a, b in zip(sources, torch.empty_like(sources))]
        ways = [[functools.partial(way, b, a) for b, a in sets] * 4 for way in copies(device)]
        return min(time_in_graph(calls).median for calls in ways)


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Flops per second of an 8192^3 matrix product of random numbers on a CUDA device: the roof of arithmetic."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / time_kernel(torch.mm, a, b, warmup=3, iters=10).median


@cache
def empty_kernel_time(device: torch.device) -> float:
    """Seconds that a kernel which does nothing takes among others in a CUDA graph."""
    from nanovllm.kernels.triton.rows.empty import launch_empty

    with torch.cuda.device(device):
        return time_in_graph([launch_empty] * 200).median
