"""How long each way of a lesson takes over sizes, how many bytes it moves, and its share of the hardware's limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nanovllm.hardware.measured_rates import Rates, rates
from nanovllm.hardware.timing import Timing, time_kernel
from nanovllm.lab.check import compare_rows, error_line
from nanovllm.lab.lesson import LARGEST_DIM, Lesson, dtype_name
from nanovllm.lab.profiled import Ran, kernels_that_ran
from nanovllm.lab.traffic import torch_traffic
from nanovllm.lab.ways import Way

_BUDGET = {"cuda": 0.5, "cpu": 0.3}
"""Seconds of timed calls for one row."""
_MOST_ITERATIONS = 50
_SIZES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024)}


@dataclass(frozen=True)
class Limits:
    """The measured limits of a device: bytes a second, and flops a second of matrix products."""

    device: str
    bandwidth: float
    matmul: float | None

    def seconds(self, num_bytes: int, flops: int) -> float:
        """The least time for these bytes and flops of a matrix product."""
        return max(num_bytes / self.bandwidth, flops / self.matmul if self.matmul else 0.0)


@dataclass(frozen=True)
class WayRow:
    """One way at one size.

    Attributes:
        timing: seconds; None: `reason` says why.
        bytes: what the way moves through device memory. counted: from PyTorch's operations, each of which reads and
            writes all of its tensors; else the least that any kernel must move.
        limit: the least seconds that the device allows.
        error: the largest error of sampled rows, divided by what is allowed.
        ran: the kernels of one call.
    """

    way: str
    dim: int
    least_bytes: int
    flops: int
    limit: float
    timing: Timing | None = None
    bytes: int = 0
    counted: bool = False
    error: float = 0.0
    ran: tuple[Ran, ...] = ()
    reason: str | None = None

    @property
    def share(self) -> float | None:
        return None if self.timing is None else self.limit / self.timing.median

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share_of_limit": self.share}


def limits(lesson: Lesson, device: torch.device, dtype: torch.dtype, refresh: bool = False) -> Limits:
    """The limits of the device, measured once and cached (nanovllm/hardware/measured_rates.py)."""
    names = (dtype_name(dtype),) if lesson.name == "matmul" else ()
    found: Rates = rates(device, names, refresh)
    return Limits(found.device, found.bandwidth, found.matmul[names[0]] if names else None)


def check_sizes(sizes: Sequence[int] | None, device: torch.device) -> tuple[int, ...]:
    """The dims to time, ascending; None: those that suit the device.

    Raises:
        ValueError: there is none, or one is below 1 or above `LARGEST_DIM`.
    """
    if sizes is None:
        return _SIZES[device.type]
    for size in sizes:
        if not 1 <= size <= LARGEST_DIM:
            raise ValueError(f"sizes: expected numbers from 1 to {LARGEST_DIM}, not {size}")
    if not sizes:
        raise ValueError("sizes: expected at least one")
    return tuple(sorted(set(sizes)))


def measure(
    lesson: Lesson, way: Way, dim: int, device: torch.device, dtype: torch.dtype, limit: Limits, seed: int
) -> WayRow:
    """Time one way on [dim, dim], after some rows of its result were compared with float64."""
    size = torch.empty(0, dtype=dtype).element_size()
    cost = lesson.cost(dim, size)
    row = WayRow(way.name, dim, cost.bytes, cost.flops, limit.seconds(cost.bytes, cost.flops if limit.matmul else 0))
    call, reason = way.call, way.reason
    if way.name == "plain" and lesson.plain_limit is not None and dim > lesson.plain_limit[0]:
        reason = f"only up to {lesson.plain_limit[0]}: {lesson.plain_limit[1]}"
    if reason is not None or call is None:
        return replace(row, reason=reason)
    inputs: Any = None
    try:
        inputs = lesson.inputs(dim, dim, dtype, device, torch.Generator(device).manual_seed(seed))
        error, failure = compare_rows(lesson, way, inputs)
        if failure is not None:
            return replace(row, error=error, reason=f"wrong: {failure}")
        with torch.inference_mode():
            once = seconds_of(lambda: call(*inputs), device)
            iters = max(3, min(_MOST_ITERATIONS, int(_BUDGET[device.type] / max(once, 1e-6))))
            timing = time_kernel(call, *inputs, warmup=min(5, iters // 3), iters=iters)
            ran = kernels_that_ran(call, inputs)
        num_bytes, counted = cost.bytes, way.name in ("plain", "torch")
        if counted:
            num_bytes, _ = torch_traffic(lesson.plain if way.name == "plain" else lesson.own, *inputs)
        return replace(row, timing=timing, bytes=num_bytes, counted=counted, error=error, ran=ran)
    except torch.OutOfMemoryError:
        return replace(row, reason="out of memory")
    except Exception as error:  # the other ways and sizes are still of use
        return replace(row, reason=f"failed: {error_line(error)}")
    finally:
        inputs = None  # frees their memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call by the host's clock, from an idle device until it is idle again."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start
