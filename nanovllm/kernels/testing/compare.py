"""The time of an op's providers, compared with each other and with the hardware limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.hardware.roofline import copy_bandwidth, copy_time, matmul_rate
from nanovllm.hardware.timing import Timing, l2_bytes, time_in_graph, time_kernel
from nanovllm.kernels.op.availability import is_triton_support
from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.inputs import Arguments, Shape, copy_of, nbytes
from nanovllm.kernels.op.provider import KernelError, Provider
from nanovllm.kernels.testing.verify import Case

COMPILED = "torch.compile"
WITHOUT_PLAN = ", without its plan"
TIMED_ON_A_GPU = "Triton kernels are timed on a GPU only; `nanovllm kernels verify` checks them here"
"""Follows a provider's name, which has no comma, if its planning for a batch was done before the clock started."""
_MOST_SETS, _MOST_BYTES = 60, 8 << 30
_MOST_FLOPS = 50
"""A byte. Only matrix products have more; others do not run on the unit whose rate is measured."""
_LEAST_COPY = 8 << 20
"""Bytes from which on a call is compared with a copy of as many."""


@dataclass(frozen=True)
class Measurement:
    """One provider on one case.

    Attributes:
        provider: its name; with `WITHOUT_PLAN` behind it where that holds.
        method: "graph" (replays of a CUDA graph; device time), "events" (calls from Python) or "host" (a CPU's clock).
        cold: whether the inputs came from device memory rather than from the L2 cache.
        share: the least time that the call's cost allows on this device, over the median time. None on a CPU.
        copy: the seconds of a plain copy of as many bytes, a limit that includes the start and end of a kernel. None on
            a CPU, for few bytes, and for matrix products.
        peak_bytes: device memory above the inputs that the call took at its peak, results included. None on a CPU.
        reason: why there is no timing.
        failed: the provider raised, though it accepts the call.
        without_plan: the time does not include what the provider does once for a batch. No call of the op is so fast,
            so no provider is selected by it.
    """

    op: str
    provider: str
    case: Case
    timing: Timing | None = None
    method: str = ""
    cold: bool = False
    bytes: int = 0
    flops: int = 0
    share: float | None = None
    copy: float | None = None
    peak_bytes: int | None = None
    reason: str | None = None
    failed: bool = False
    without_plan: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The measurement for JSON."""
        timing = self.timing
        return {
            "op": self.op,
            "provider": self.provider,
            "shape": list(self.case.shape),
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "variant": dict(self.case.variant),
            **(
                {}
                if timing is None
                else {"us": 1e6 * timing.median, "p20_us": 1e6 * timing.p20, "p80_us": 1e6 * timing.p80}
            ),
            "method": self.method,
            "l2_cold": self.cold,
            "bytes": self.bytes,
            "flops": self.flops,
            "share_of_limit": self.share,
            "copy_us": None if self.copy is None else 1e6 * self.copy,
            "peak_bytes": self.peak_bytes,
            "reason": self.reason,
            "without_plan": self.without_plan,
        }


def least_time(declared: Op, arguments: Arguments, dtype: torch.dtype, device: torch.device) -> tuple[int, int, float]:
    """(bytes, flops, the seconds that they need at this GPU's measured copy bandwidth and matrix rate)."""
    assert declared.cost is not None
    cost = declared.cost(**arguments)
    seconds = cost.bytes / copy_bandwidth(device)
    if cost.flops > _MOST_FLOPS * cost.bytes:
        seconds = max(seconds, cost.flops / matmul_rate(device, dtype))
    return cost.bytes, cost.flops, seconds


def measure(
    declared: Op, provider: Provider, case: Case, device: torch.device, without_plan: bool = False
) -> Measurement:
    """Time a provider on one case.

    Args:
        without_plan: time not the provider's calls but the functions that its `planned` returned beforehand, one for
            each set of inputs. Such a provider plans a batch on the host and reuses the plan for other queries and
            caches.
    """
    name = provider.name + (WITHOUT_PLAN if without_plan else "")
    measured = functools.partial(Measurement, declared.name, name, case, without_plan=without_plan)
    if device.type == "cpu" and is_triton_support(provider.support):
        return measured(reason=TIMED_ON_A_GPU)
    reason = provider.support(device)
    if reason is not None:
        return measured(reason=reason)
    sets = argument_sets(declared, case, device)
    try:
        reason = declared.refusal(provider, **declared.records.group(sets[0]))
    except KernelError as e:
        reason = str(e)
    if reason is not None:
        return measured(reason=reason)
    calls: list[Callable[[], Any]] = []
    try:
        for arguments in map(declared.records.group, sets):
            if without_plan and provider.planned_fn is not None:
                calls.append(provider.planned_fn(**arguments))
            else:
                calls.append(functools.partial(provider.fn, **arguments))

        def first(**arguments: Any) -> Any:  # given the arguments, from which the clock takes the device
            return calls[0]()

        if device.type != "cuda":
            timing = time_kernel(first, warmup=2, iters=10, **sets[0])
            assert declared.cost is not None
            cost = declared.cost(**sets[0])
            return measured(timing, "host", False, cost.bytes, cost.flops)
        peak = _peak_bytes(calls[0])
        cold = len(sets) > 1 or nbytes(*_tensors(sets[0])) > 2 * l2_bytes(device)
        try:
            timing, method = time_in_graph(calls * max(1, 8 // len(calls))), "graph"
        except (RuntimeError, ValueError):  # the provider waits for the device, which a graph cannot hold, or says so
            torch.cuda.synchronize(device)
            timing, method, cold = time_kernel(first, warmup=3, iters=20, **sets[0]), "events", True
        num_bytes, flops, least = least_time(declared, sets[0], case.dtype, device)
        copied = num_bytes >= _LEAST_COPY and flops <= _MOST_FLOPS * num_bytes
        copy = _copy_time(device, num_bytes) if copied else None
        return measured(timing, method, cold, num_bytes, flops, least / timing.median, copy, peak)
    except torch.OutOfMemoryError:
        return measured(reason="out of memory")
    except Exception as e:
        return measured(reason=f"{type(e).__name__}: {e}", failed=True)
    finally:
        sets.clear()
        calls.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _copy_time(device: torch.device, num_bytes: int) -> float | None:
    """None: there is not enough memory for such a copy in addition to the inputs."""
    try:
        return copy_time(device, num_bytes)
    except torch.OutOfMemoryError:
        return None


def compiled(declared: Op) -> Provider:
    """torch.compile of the reference: what PyTorch makes of it without anyone writing a kernel."""
    return Provider(COMPILED, torch.compile(declared.native, dynamic=False))


def bench_cases(declared: Op, dtype: torch.dtype, shapes: Sequence[Shape] | None = None) -> Iterator[Case]:
    """The decode and the large shapes (or those given), with the op's first variant."""
    inputs = declared.inputs
    assert inputs is not None
    chosen = [*inputs.decode, *inputs.large] if shapes is None else shapes
    for shape in chosen:
        yield Case(shape, dtype, inputs.variants[0])


def providers_by_speed(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Provider -> its time over the fastest's, as the geometric mean over the cases that all of them ran; fastest
    first.

    Of calls as an engine makes them: what was timed without its plan does not count.
    """
    times: dict[str, dict[Case, float]] = {}
    for m in measurements:
        if m.provider != COMPILED and not m.without_plan:
            times.setdefault(m.provider, {})
            if m.timing is not None:
                times[m.provider][_key(m.case)] = m.timing.median
    times = {p: t for p, t in times.items() if t}
    shared = set.intersection(*(set(t) for t in times.values())) if times else set()
    if not shared:
        return {}
    means = {p: math.exp(sum(math.log(t[c]) for c in shared) / len(shared)) for p, t in times.items()}
    best = min(means.values())
    return {p: means[p] / best for p in sorted(means, key=means.__getitem__)}


def slower_somewhere(measurements: Sequence[Measurement], chosen: str, margin: float = 1.03) -> list[Measurement]:
    """Cases where another provider beats the chosen one by more than the noise: that provider's measurements."""
    mine = {_key(m.case): m.timing.median for m in measurements if m.provider == chosen and m.timing is not None}
    return [
        m
        for m in measurements
        if m.provider not in (chosen, COMPILED)
        and not m.without_plan
        and m.timing is not None
        and m.timing.median * margin < mine.get(_key(m.case), 0)
    ]


def _key(case: Case) -> Any:
    return (case.shape, case.dtype, tuple(sorted(case.variant.items())))


def argument_sets(declared: Op, case: Case, device: torch.device) -> list[Arguments]:
    """A case's arguments and copies of them: between two uses of one set, the others pass through the L2 cache.

    Very large or very small inputs get fewer copies than that takes.
    """
    first = case.arguments(declared, device)
    if device.type != "cuda":
        return [first]
    size = nbytes(*_tensors(first))
    read = size if declared.cost is None else min(size, declared.cost(**first).bytes)
    wanted = 1 + -(-5 * l2_bytes(device) // 2 // max(1, read))
    copies = min(_MOST_SETS, max(1, _MOST_BYTES // max(1, size)), wanted) - 1
    return [first, *(_copy(first) for _ in range(copies))]


def _copy(arguments: Mapping[str, Any]) -> Arguments:
    return {k: copy_of(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def _tensors(arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    return [v for v in arguments.values() if isinstance(v, torch.Tensor)]


def _peak_bytes(call: Callable[[], Any]) -> int:
    """Device memory that a call takes above what was allocated before it; in a second call, when all is compiled."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
    return peak
