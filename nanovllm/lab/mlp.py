"""How the time of training steps of an MLP grows: with steps, layers, batch and dim.

Arithmetic says: in proportion to steps, layers and batch, and with the square of dim. What is measured says where that
holds and where something else is the limit: the host, which launches a kernel after the other, or kernels too small to
fill the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.hardware.measured_rates import Rates, rates
from nanovllm.hardware.versions import versions
from nanovllm.lab.lesson import dtype_name
from nanovllm.lab.profiled import Ran, kernels_that_ran

SWEEPS = ("steps", "layers", "batch", "dim")
_BUDGET = {"cuda": 1.0, "cpu": 0.4}
"""Seconds of timed runs for one point."""
_MOST_RUNS = 30
_LARGEST = {"steps": 1024, "layers": 1024, "batch": 1 << 20, "dim": 32768}


@dataclass(frozen=True)
class Shape:
    """A run: `steps` forward and backward passes of `layers` of GELU(x @ W), W [dim, dim], x [batch, dim]."""

    steps: int
    layers: int
    batch: int
    dim: int

    @staticmethod
    def default(device: torch.device, steps: int, layers: int, batch: int | None, dim: int | None) -> Shape:
        """What suits the device for those that are None."""
        size = 1024 if device.type == "cuda" else 128
        return Shape(steps, layers, size if batch is None else batch, size if dim is None else dim)

    def __post_init__(self) -> None:
        for name, most in _LARGEST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: expected a number from 1 to {most}, not {getattr(self, name)}")

    @property
    def flops(self) -> int:
        """Of the matrix products: one forward, two backward, but for the first layer, whose input needs no gradient."""
        return self.steps * (3 * self.layers - 1) * 2 * self.batch * self.dim**2


@dataclass(frozen=True)
class Point:
    """One shape of a sweep.

    Attributes:
        seconds: from the first launch until the device is done: the median run, host time included.
        ratio, flops_ratio: seconds and flops over those of the sweep's first point.
        share: of the measured rate of matrix products.
        ran: with `profile`, the kernels of one run.
        reason: why there is no time.
    """

    shape: Shape
    seconds: float | None = None
    ratio: float | None = None
    flops_ratio: float | None = None
    share: float | None = None
    ran: tuple[Ran, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Sweeps:
    """All that was measured. `points`: by what was swept."""

    rates: Rates
    device: torch.device
    dtype: torch.dtype
    base: Shape
    points: dict[str, tuple[Point, ...]]

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.rates.device,
            "dtype": self.dtype_name,
            "versions": versions(),
            "matmul_flops_per_second": self.rates.matmul[self.dtype_name],
            "base": asdict(self.base),
            "sweeps": {
                name: [{**asdict(p), "flops": p.shape.flops} for p in points] for name, points in self.points.items()
            },
        }


def run_sweeps(
    base: Shape,
    device: torch.device,
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
    factors: Sequence[int] = (1, 2, 4, 8),
    profile: bool = False,
    seed: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Sweeps:
    """Sweep one number at a time, the others staying as in `base`.

    Args:
        dtype: by default bfloat16 on a GPU, float32 on a CPU.
        names: of `SWEEPS`; all for None.
        factors: what the number is multiplied by, ascending.
        profile: also record the kernels of the first and the last point of each sweep.

    Raises:
        ValueError: an argument is not one of those that are possible.
    """
    for name in names or ():
        if name not in SWEEPS:
            raise ValueError(f"sweep: expected one of {', '.join(SWEEPS)}, not {name!r}")
    if not factors or any(f < 1 for f in factors) or list(factors) != sorted(set(factors)):
        raise ValueError(
            f"factors: expected ascending numbers from 1, such as 1,2,4,8, not {','.join(map(str, factors))}"
        )
    chosen = [n for n in SWEEPS if not names or n in names]
    # All shapes before the first run: a number that is too large is an error now, not in ten minutes.
    shapes = {n: [replace(base, **{n: getattr(base, n) * f}) for f in factors] for n in chosen}
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    seed = time.time_ns() % 2**31 if seed is None else seed
    tell("measuring the device")
    found = rates(device, (dtype_name(dtype),))
    points = {}
    for name in chosen:
        row: list[Point] = []
        for i, shape in enumerate(shapes[name]):
            tell(f"{name}: {getattr(shape, name)}")
            ends = i in (0, len(factors) - 1)
            row.append(_measure(shape, device, dtype, found, profile and ends, seed, row[0] if row else None))
        points[name] = tuple(row)
    return Sweeps(found, device, dtype, base, points)


def make_run(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], torch.Tensor]:
    """A function that runs `shape.steps` steps and returns the last loss. Gradients are dropped before each step."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    # Weights of a variance that keeps activations of the same size from layer to layer.
    weights = [(normal(shape.dim, shape.dim) * (2 / shape.dim) ** 0.5).to(dtype) for _ in range(shape.layers)]
    for weight in weights:
        weight.requires_grad_()
    inputs = normal(shape.batch, shape.dim).to(dtype)

    def run() -> torch.Tensor:
        loss = inputs
        for _ in range(shape.steps):
            for weight in weights:
                weight.grad = None
            x = inputs
            for weight in weights:
                x = F.gelu(x @ weight)
            loss = x.float().square().mean()
            loss.backward()
        return loss.detach()

    return run


def _measure(
    shape: Shape, device: torch.device, dtype: torch.dtype, found: Rates, profile: bool, seed: int, first: Point | None
) -> Point:
    run: Any = None
    try:
        run = make_run(shape, device, dtype, seed)
        seconds = _wall_time(run, device)
        # The profiler is told of a GPU by a tensor among the arguments.
        ran = kernels_that_ran(lambda _: run(), [torch.empty(0, device=device)]) if profile else ()
    except torch.OutOfMemoryError:
        return Point(shape, reason="out of memory")
    finally:
        run = None  # frees its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    rate = found.matmul[dtype_name(dtype)]
    ratio, flops_ratio = (1.0, 1.0) if first is None else (None, shape.flops / first.shape.flops)
    if first is not None and first.seconds:
        ratio = seconds / first.seconds
    return Point(shape, seconds, ratio, flops_ratio, shape.flops / seconds / rate, ran)


def _wall_time(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of the median run by the host's clock, from a device that is idle until it is idle again."""

    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    once = timed()
    runs = max(3, min(_MOST_RUNS, int(_BUDGET[device.type] / once)))
    return statistics.median(timed() for _ in range(runs))
