"""How fast this device is, as measured on it: memory, cache and matrix products.

A share of the limit is only as honest as the limit, so each rate is the best of several ways to reach it: what reads
memory faster than the roof would make a share above 100 %.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.hardware.gpu_name import device_name, slug
from nanovllm.hardware.product_rates import best_rates
from nanovllm.hardware.roofline import copies
from nanovllm.hardware.timing import least_time, time_in_graph
from nanovllm.hardware.versions import versions
from nanovllm.json_output import keep_json

_MIB = 2**20
_SCHEMA = 3
_LONG_ENOUGH = 1.0
"""Seconds for the repeats of one call on a CPU."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of one device.

    Attributes:
        device: its name, for example "NVIDIA H200", or "cpu" with the number of threads.
        bandwidth: bytes a second, the best of reading and copying (there read and written bytes count).
        read, copy: the two of them.
        matmul: flops a second by dtype, for example {"bfloat16": 7.9e14}; random numbers, the best of several sizes.
        cache_bytes, cache_bandwidth: the L2 cache; 0 where it was not measured.
        kernel_seconds: what a kernel that does nothing takes among others in a CUDA graph; 0 on a CPU.
        dram_latency, cache_latency: seconds from a load to its data, from memory and from the L2 cache; 0 where not
            measured.
    """

    device: str
    bandwidth: float
    read: float
    copy: float
    matmul: dict[str, float]
    cache_bytes: int = 0
    cache_bandwidth: float = 0.0
    kernel_seconds: float = 0.0
    dram_latency: float = 0.0
    cache_latency: float = 0.0


def best_of(a: Rates, b: Rates) -> Rates:
    """The better of two measurements of one device: what else runs on the machine only ever slows them down."""
    matmul = {k: max(r.matmul.get(k, 0.0) for r in (a, b)) for k in {**a.matmul, **b.matmul}}
    named = {f: max(getattr(a, f), getattr(b, f)) for f in ("bandwidth", "read", "copy", "cache_bandwidth")}
    shortest = {f: min(getattr(a, f), getattr(b, f)) for f in ("kernel_seconds", "dram_latency", "cache_latency")}
    return replace(b, matmul=matmul, **shortest, **named)


def rates(
    device: torch.device, dtypes: tuple[str, ...] = ("bfloat16",), refresh: bool = False, meter: Meter | None = None
) -> Rates:
    """The device's rates, from the cache of this GPU and these versions. What it lacks is measured, in a few seconds.

    Args:
        dtypes: whose matrix products to measure, by the names of `gpu_presets.DTYPE_BYTES`. One that cannot be
            multiplied here has 0.
        refresh: measure anyway. What is found is kept, beside what is known of other dtypes.
        meter: what measures.
    """
    meter = meter or Meter()
    path = _cache_dir() / f"{slug(device_name(device))}-{'-'.join(meter.versions().values())}.json"
    known = _load(path)
    if known is None or known.device != device_name(device) or refresh:
        found = meter.measure(device, dtypes)
        matmul = known.matmul if known is not None and known.device == found.device else {}
        _keep(path, replace(found, matmul={**matmul, **found.matmul}))
        return found
    missing = tuple(d for d in dtypes if d not in known.matmul)
    if missing:
        known = replace(known, matmul={**known.matmul, **meter.measure_matmul(device, missing)})
        _keep(path, known)
    return known


def _keep(path: Path, measured: Rates) -> None:
    try:
        keep_json(path, {"schema": _SCHEMA, **asdict(measured)})
    except OSError:
        pass  # a read-only home: measured again next time


def measure(device: torch.device, dtypes: tuple[str, ...]) -> Rates:
    """Measure now."""
    name = device_name(device)
    with torch.inference_mode():
        if device.type == "cuda":
            with torch.cuda.device(device):
                return _measure_cuda(device, name, dtypes)
        return _measure_cpu(name, dtypes)


def measure_matmul(device: torch.device, dtypes: tuple[str, ...]) -> dict[str, float]:
    """Measure now, and only matrix products: flops a second by dtype."""
    with torch.inference_mode():
        if device.type != "cuda":
            return _measure_cpu_matmul(dtypes)
        with torch.cuda.device(device):
            found = best_rates(device, dtypes)
            torch.cuda.empty_cache()
            return found


@dataclass(frozen=True)
class Meter:
    """What measures a device, and the versions that it measures with."""

    measure: Callable[[torch.device, tuple[str, ...]], Rates] = measure
    measure_matmul: Callable[[torch.device, tuple[str, ...]], dict[str, float]] = measure_matmul
    versions: Callable[[], dict[str, str]] = versions


def _load(path: Path) -> Rates | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        return Rates(**stored) if stored.pop("schema", None) == _SCHEMA else None
    except (OSError, ValueError, TypeError):
        return None


def _cache_dir() -> Path:
    """The directory where the default model is, too: $NANOVLLM_CACHE, else $XDG_CACHE_HOME/nanovllm, else
    ~/.cache/nanovllm.
    """
    if os.environ.get("NANOVLLM_CACHE"):
        return Path(os.environ["NANOVLLM_CACHE"]).expanduser() / "rates"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanovllm" / "rates"


# ------------------------------------------------------------------------------------------------------------- CPU


def _measure_cpu(name: str, dtypes: tuple[str, ...]) -> Rates:
    source = torch.ones(64 * _MIB, dtype=torch.float32)  # 256 MiB, more than most last-level caches
    target = torch.ones_like(source)  # a system may need a second for pages that are touched first
    vector = torch.ones(4096)
    matrix = source.view(-1, 4096)
    # A matrix-vector product is what decoding does; a plain sum is limited by arithmetic on some CPUs.
    read = source.nbytes / least([lambda: matrix @ vector, source.sum])
    copy = 2 * source.nbytes / least([lambda: target.copy_(source)])
    return Rates(name, max(read, copy), read, copy, _measure_cpu_matmul(dtypes))


def _measure_cpu_matmul(dtypes: tuple[str, ...]) -> dict[str, float]:
    matmul = {}
    for dtype in dtypes:
        n = 1024
        a, b = (torch.randn(n, n).to(getattr(torch, dtype)) for _ in range(2))
        matmul[dtype] = 2 * n**3 / least([functools.partial(torch.mm, a, b)], repeats=20)
    return matmul


def least(calls: list[Callable[[], Any]], repeats: int = 6, clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest time in seconds of any of the calls: other programs only ever add to it.

    A call that takes long is repeated less: some CPUs need seconds for a product in a 16-bit type.
    """
    best = float("inf")
    for call in calls:
        began = clock()
        for _ in range(repeats):
            started = clock()
            call()
            ended = clock()
            best = min(best, ended - started)
            if ended - began > _LONG_ENOUGH:
                break
    return best


# ------------------------------------------------------------------------------------------------------------- CUDA


def _measure_cuda(device: torch.device, name: str, dtypes: tuple[str, ...]) -> Rates:
    """Nothing stays allocated: what measures after us, perhaps another process, finds the memory as it was."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    read, copy, cache_bandwidth = _bandwidths(device, cache_bytes)
    # Before anything lasting is allocated, such as the matrix products' workspace: it would be cut from these blocks
    # and hold them.
    torch.cuda.empty_cache()
    matmul = best_rates(device, dtypes)
    torch.cuda.empty_cache()
    kernel_seconds, latencies = _kernel_seconds(device), _latencies(device, cache_bytes)
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()
    return Rates(
        name, max(read, copy), read, copy, matmul, cache_bytes, max(cache_bandwidth, read), kernel_seconds, *latencies
    )


def _bandwidths(device: torch.device, cache_bytes: int) -> tuple[float, float, float]:
    """Bytes per second of reading and of copying in device memory, and of the L2 cache: 0 without Triton.

    A function of its own, so that its tensors are freed at its end.
    """
    free = torch.cuda.mem_get_info(device)[0]
    num_bytes = min(4 * 2**30, free // 4) // 4096 * 4096
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ways = [functools.partial(way, target, source) for way in (torch.Tensor.copy_, *copies(device))]
    copy = 2 * source.nbytes / min(least_time(way) for way in ways)
    del target, ways
    times = [least_time(call) for call in (source.sum, source.view(-1, 4096).amax)]
    cache_bandwidth = 0.0
    try:
        from nanovllm.hardware.probe_kernels import read_time

        times.append(read_time(source, least_time))
        small = source[: min(cache_bytes // 4, num_bytes) // 4]
        passes = 64
        cache_bandwidth = passes * small.nbytes / read_time(small, least_time, passes)
    except ImportError:  # no Triton here: PyTorch's reductions have to do
        pass
    return source.nbytes / min(times), copy, cache_bandwidth


def _latencies(device: torch.device, cache_bytes: int) -> tuple[float, float]:
    """Seconds of latency of device memory and of the L2 cache; zeros without Triton."""
    try:
        from nanovllm.hardware.probe_kernels import chase_seconds
    except ImportError:
        return 0.0, 0.0
    # A sixteenth of the cache: half of it may be the part of the other multiprocessors, which holds copies.
    small = chase_seconds(max(1 << 20, cache_bytes // 16), 4096, device, least_time)
    return chase_seconds(8 * max(cache_bytes, 32 * _MIB), 4096, device, least_time), small


def _kernel_seconds(device: torch.device) -> float:
    x = torch.zeros(1, device=device)
    return time_in_graph([x.zero_] * 200).median
