"""The kernels that a call ran, from PyTorch's profiler."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes lines of its own to standard error

_BOOKKEEPING = {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "item",
        "_local_scalar_dense", "reshape", "resolve_conj", "resolve_neg", "result_type", "select", "slice", "t", "to",
        "_to_copy", "transpose", "unsqueeze", "view",
        "layer_norm", "linear", "matmul", "softmax", "square", "zeros", "zero_",  # they call what computes
    )
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A kernel of a GPU, or an operator or compiled function of a CPU: how often it ran, and seconds in all."""

    name: str
    count: int
    seconds: float


def kernels_that_ran(call: Callable[..., Any], args: Sequence[Any]) -> tuple[Ran, ...]:
    """What one call runs, in the order of first appearance. Call it once before, so that nothing is compiled here."""
    on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        call(*args)
        if on_gpu:
            torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in sorted(recorded.events(), key=lambda e: e.time_range.start):
        if on_gpu and event.device_type == DeviceType.CUDA and not _is_annotation(event):
            found[event.name].append(event.time_range.elapsed_us() / 1e6)
        elif not on_gpu and ("cpp_fused" in event.name or event.name.startswith("aten::")):
            if event.name not in _BOOKKEEPING:
                found[event.name].append(event.self_cpu_time_total / 1e6)
    return tuple(Ran(name, len(times), sum(times)) for name, times in found.items())


def _is_annotation(event: Any) -> bool:
    """Whether an event is a range of the host, such as torch.compile's, which the profiler shows on the device too."""
    ranges = "## ", "Torch-Compiled Region", "ProfilerStep"
    return getattr(event, "is_user_annotation", False) or event.name.startswith(ranges)
