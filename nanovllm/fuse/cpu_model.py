"""A CPU as a device for the cost model: measured now, since CPUs have no presets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial

import torch

from nanovllm.hardware.measured_rates import least


@dataclass(frozen=True)
class CpuModel:
    """A CPU with the attributes of `FusionDevice`.

    Its caches hide latency, and a compiler works around a lack of registers, so those fields are 0. `launch` is the
    time in which PyTorch calls an operator.
    """

    name: str
    bandwidth: float
    l2_bytes: int
    l2_bandwidth: float
    launch: float
    vector_flops: float
    matmul: dict[str, float] = field(hash=False)
    sms: int = 1
    registers_per_sm: int = 0
    registers_per_thread: int = 0
    shared_per_sm: int = 0
    shared_per_block: int = 0
    warps_per_sm: int = 0
    l2_latency: float = 0.0
    dram_latency: float = 0.0

    def rate(self, dtype: str) -> float:
        if dtype not in self.matmul:
            raise ValueError(f"dtype: the products of {dtype} were not measured; {', '.join(self.matmul)} were")
        return self.matmul[dtype]


def measure_cpu(dtypes: tuple[str, ...] = ("float32",), cache_bytes: int = 1 << 20) -> CpuModel:
    """Measure this CPU with PyTorch's present number of threads; takes about a second.

    Args:
        dtypes: whose matrix products to measure.
        cache_bytes: a working set that stays in a core's own cache.
    """
    large, small, one = torch.ones(32 << 20), torch.ones(cache_bytes // 8), torch.ones(1)  # large: 128 MiB
    target, into = torch.empty_like(large), torch.empty_like(small)
    copy = 2 * large.nbytes / least([lambda: target.copy_(large)])
    launch = least([lambda: one + one], 400)
    cached = 2 * small.nbytes / max(1e-9, least([lambda: into.copy_(small)], 200) - launch)
    # Arithmetic as the cost model counts it: an exponential counts 8.
    vector = 8 * small.numel() / max(1e-9, least([lambda: torch.exp(small, out=into)], 100) - launch)
    matmul = {}
    for dtype in dtypes:
        a, b = (torch.randn(512, 512).to(getattr(torch, dtype)) for _ in range(2))
        matmul[dtype] = 2 * 512**3 / least([partial(torch.matmul, a, b)], 10)
    threads = torch.get_num_threads()
    name = f"cpu, {threads} of {os.cpu_count()} threads"
    return CpuModel(name, copy, 4 * cache_bytes, max(cached, copy), launch, vector, matmul, threads)
