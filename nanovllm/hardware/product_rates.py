"""How fast a GPU multiplies matrices: random numbers in every dtype, in several sizes and ways."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.hardware.precision import float32_products
from nanovllm.hardware.timing import least_time

_REST = 0.1
"""Seconds before a product, in which a GPU's clock recovers."""
_MEMORY = {"tfloat32": "float32"}


def best_rates(device: torch.device, dtypes: tuple[str, ...]) -> dict[str, float]:
    """The best flops a second of a CUDA device, by dtype."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {dtype: max(matmul_rates(dtype, device, product_sizes(dtype, sms))) for dtype in dtypes}


def has_fp8_products(device: torch.device) -> bool:
    """Whether a device has tensor cores for 8-bit floats: compute capability 8.9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def product_sizes(dtype: str, sms: int) -> Sequence[tuple[int, int, int]]:
    """(m, n, k) of the products whose best counts.

    Squares, a down projection at prefill, 128 tiles of 256 x 128, and exactly one such tile for each multiprocessor, so
    that none idles in a last round.
    """
    if dtype == "float32":
        return ((4096, 4096, 4096),)
    rows = max(n for n in range(1, math.isqrt(sms) + 1) if sms % n == 0)
    return ((8192, 8192, 8192), (16384, 4096, 12288), (1024, 4096, 32768), (256 * rows, 128 * (sms // rows), 32768))


def matmul_rates(
    dtype: str, device: torch.device, sizes: Sequence[tuple[int, int, int]],
    least: Callable[[Callable[[], Any]], float] = least_time,
) -> Iterator[float]:  # fmt: skip
    """Flops a second of products of random numbers, and of gated ones as a down projection is given.

    Clocks depend on power, and power on the data and on what ran before. Many small values run a little faster than
    plain noise, and a short product after a rest faster than a long one. 0 where PyTorch has no product of float8 or
    int8 for this GPU.

    Args:
        sizes: (m, n, k) of the products.
        least: gives the shortest time of several calls of a function.
    """
    narrow = dtype in ("float8", "int8")
    wide = torch.bfloat16 if narrow else getattr(torch, _MEMORY.get(dtype, dtype))
    for m, n, k in sizes:
        a, gate, b = (torch.randn(s, device=device).to(wide) for s in ((m, k), (m, k), (n, k)))
        for x in (a, F.silu(gate) * a):
            for call in products(dtype, x, b):
                _rest(device)
                try:
                    with float32_products(dtype):
                        seconds = least(call)
                except RuntimeError as e:
                    if not narrow or isinstance(e, torch.OutOfMemoryError):
                        raise
                    seconds = float("inf")
                yield 2 * m * n * k / seconds


def _rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        time.sleep(_REST)


def products(dtype: str, x: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], Any]]:
    """Calls that multiply x [m, k] by the transpose of weight [n, k] in `dtype`: all ways that PyTorch has, of which
    the best counts.
    """
    if dtype == "int8":
        x, weight = ((32 * t).round().clamp(-127, 127).to(torch.int8) for t in (x, weight))
        return [functools.partial(torch._int_mm, x, weight.t())]
    if dtype == "float8":
        x, weight = (t.to(torch.float8_e4m3fn) for t in (x, weight))
        one = torch.ones((), device=x.device)
        by_row = torch.ones((len(x), 1), device=x.device), torch.ones((1, len(weight)), device=x.device)
        return [
            functools.partial(
                torch._scaled_mm, x, weight.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            for a, b in ((one, one), by_row)
            for fast in (True, False)
        ]
    return [functools.partial(F.linear, x, weight)]
