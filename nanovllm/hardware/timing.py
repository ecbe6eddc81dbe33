"""Timing of kernels: one call from Python, or many in a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.hardware.graph_capture import GraphMemory, recover_generator
from nanovllm.wording import counted


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

    On a GPU: CUDA events around every call, on the current stream. Before each call a buffer of several times the L2
        cache
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
        print(f"{name}: p20 {low:.2f} us, median {mid:.2f} us, p80 {high:.2f} us over {counted(iters, 'call')}")
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
        for before, after in events:
            if cold_l2:
                eviction.zero_()
            before.record()
            fn(*args, **kwargs)
            after.record()
        torch.cuda.synchronize(device)
        return Timing.of([before.elapsed_time(after) / 1e3 for before, after in events])


def time_in_graph(calls: Sequence[Callable[[], Any]], replays: int = 20) -> Timing:
    """Seconds per call of `calls`, run one after the other in a CUDA graph: what the device needs, without launches
    by the host.

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


def least_time(call: Callable[[], Any], warmup: int = 3, repeats: int = 12) -> float:
    """The shortest device time in seconds of a call."""
    for _ in range(warmup):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in zip(events, events[1:])) / 1e3


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size
