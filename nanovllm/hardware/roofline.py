"""The roofline of a device: its limits as kernels are timed, and the share of a limit that some work in some time
reaches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nanovllm.hardware.timing import l2_bytes, time_in_graph, time_kernel


@dataclass(frozen=True)
class Work:
    """Bytes through device memory and floating-point operations.

    Attributes:
        flops: all of them.
        fp8_flops: those of `flops` that are products of 8-bit floats with 8-bit floats.
    """

    bytes: int = 0
    flops: int = 0
    fp8_flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.fp8_flops + other.fp8_flops)

    def product_seconds(self, matmul: float, fp8_matmul: float = float("inf")) -> float:
        """The least time of the flops, each at its rate in flops a second."""
        return (self.flops - self.fp8_flops) / matmul + self.fp8_flops / fp8_matmul


@dataclass(frozen=True)
class Share:
    """How much of the hardware a time used: of the memory bandwidth, of the matmul rate, and of whichever binds."""

    mbu: float
    mfu: float

    @property
    def limit(self) -> float:
        return max(self.mbu, self.mfu)


def share_of_limit(
    work: Work, seconds: float, bandwidth: float, matmul: float, fp8_matmul: float = float("inf")
) -> Share:
    """Shares as fractions of 1.

    Args:
        bandwidth: bytes a second. matmul: flops a second. fp8_matmul: the same of products of 8-bit floats; infinite:
            these count nothing.
    """
    return Share(work.bytes / bandwidth / seconds, work.product_seconds(matmul, fp8_matmul) / seconds)


def op_floor(
    work: Work, bandwidth: float, matmul: float, cache_bytes: int = 0, cache_bandwidth: float = 0.0,
    cold_bytes: int = 0, fp8_matmul: float = float("inf"),
) -> float:  # fmt: skip
    """The least time in seconds of one call of an op.

    Args:
        bandwidth, matmul, fp8_matmul: as of `share_of_limit`.
        cache_bytes: what the L2 cache holds. The kernel before may have left that much of the operands there, and that
            much of the results may stay there until after the kernel has ended. 0: everything passes the memory.
        cache_bandwidth: bytes a second between the cache and the multiprocessors, which every byte passes.
        cold_bytes: how many of the bytes are known to come from memory: weights and the KV cache.
    """
    memory = max(cold_bytes, work.bytes - cache_bytes) / bandwidth
    if cache_bytes and cache_bandwidth:
        memory = max(memory, work.bytes / cache_bandwidth)
    return max(memory, work.product_seconds(matmul, fp8_matmul))


# ---------------------------------------------------------------------------------------- limits, timed as kernels are


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: a GPU of compute capability 8.0 or later, or a CPU with Triton's
    interpreter.
    """
    try:
        import triton
    except Exception:  # whatever a damaged installation raises
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return device.type == "cpu" and bool(triton.knobs.runtime.interpret)


def copies(device: torch.device) -> list[Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Functions of (target, source), contiguous and aligned to 16 bytes, that copy. The fastest is the yardstick.

    Where Triton runs these are kernels of our own, launched as our elementwise ops are. `Tensor.copy_` is a node of the
    driver's in a CUDA graph, which for some sizes takes 1.3 to 1.6 times as long as for sizes next to them.
    """
    if not runs_triton(device):
        return [torch.Tensor.copy_]
    from nanovllm.hardware.probe_kernels import copy, copy_plans

    dependent_launch = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return [functools.partial(copy, plan=plan) for plan in copy_plans(dependent_launch)]


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on a CUDA device, read and written bytes counted: the roof of an elementwise
    kernel.
    """
    source = torch.empty(1 << 30, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    # Outside of a graph `copy_` is no such node, and one more way to reach the roof.
    ways = dict.fromkeys((torch.Tensor.copy_, *copies(device)))
    return 2 * source.numel() / min(time_kernel(way, target, source, warmup=3, iters=20).median for way in ways)


@cache
def copy_time(device: torch.device, num_bytes: int) -> float:
    """Seconds of a copy that reads and writes `num_bytes` in all, timed as kernels are: in a CUDA graph, from device
    memory.

    Of 10 or 100 MB it takes longer than `copy_bandwidth` allows, as any kernel does that has to start, and to run
    out, in that time.
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
    from nanovllm.hardware.probe_kernels import launch_empty

    with torch.cuda.device(device):
        return time_in_graph([launch_empty] * 200).median
