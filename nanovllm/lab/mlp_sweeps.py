"""How the time of training steps of an MLP grows with steps, layers, batch and dim.

The arithmetic grows in proportion to steps, layers and batch, and with the square of dim. The measurement shows where
something else is the limit: the host, which launches the kernels, or kernels too small to fill the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.hardware.measured_rates import Rates, rates
from nanovllm.hardware.versions import versions
from nanovllm.lab.lesson import dtype_name
from nanovllm.lab.profiled import Ran, kernels_that_ran
from nanovllm.lab.way_timing import seconds_of

SWEEPS = ("steps", "layers", "batch", "dim")
BUDGET = {"cuda": 1.0, "cpu": 0.4}
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
        """A shape whose batch and dim suit the device if they are None."""
        size = 1024 if device.type == "cuda" else 128
        return Shape(steps, layers, size if batch is None else batch, size if dim is None else dim)

    def __post_init__(self) -> None:
        for name, most in _LARGEST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: expected a number from 1 to {most}, not {getattr(self, name)}")

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products: one forward, two backward; the first layer needs no gradient of its input."""
        return self.steps * (3 * self.layers - 1) * 2 * self.batch * self.dim**2


@dataclass(frozen=True)
class Point:
    """One shape of a sweep.

    Attributes:
        seconds: the seconds of the median run, from the first launch until the device is idle; host time included.
        ratio, flops_ratio: seconds and flops over those of the first point of the sweep.
        share: the share of the measured rate of matrix products.
        ran: the kernels of one run, with `profile`.
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
    """The measurements. `points`: by the name of the swept number; `interrupted`: Ctrl-C ended them early."""

    rates: Rates
    device: torch.device
    dtype: torch.dtype
    base: Shape
    points: dict[str, tuple[Point, ...]]
    interrupted: bool = False

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.rates.device, "dtype": self.dtype_name, "versions": versions(),
            "matmul_flops_per_second": self.rates.matmul[self.dtype_name], "base": asdict(self.base),
            "sweeps": {n: [{**asdict(p), "flops": p.shape.flops} for p in s] for n, s in self.points.items()},
        }  # fmt: skip


def run_sweeps(
    base: Shape,
    device: torch.device,
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
    factors: Sequence[int] = (1, 2, 4, 8),
    profile: bool = False,
    seed: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
    budget: Mapping[str, float] = BUDGET,
) -> Sweeps:
    """Sweep one number at a time; the others stay as in `base`. Ctrl-C ends it, and the result has what is there.

    Args:
        dtype: by default bfloat16 on a GPU, float32 on a CPU.
        names: the names of `SWEEPS`; None: all.
        factors: what the number is multiplied by, ascending.
        profile: also record the kernels of the first and the last point of each sweep.
        budget: seconds of timed runs for one point, by the type of the device.

    Raises:
        ValueError: an argument has a value that is not possible.
    """
    for name in names or ():
        if name not in SWEEPS:
            raise ValueError(f"sweep: expected one of {', '.join(SWEEPS)}, not {name!r}")
    if not factors or any(f < 1 for f in factors) or list(factors) != sorted(set(factors)):
        raise ValueError(
            f"factors: expected ascending numbers from 1, such as 1,2,4,8, not {','.join(map(str, factors))}"
        )
    chosen = [n for n in SWEEPS if not names or n in names]
    # All shapes before the first run: a number that is too large is an error at once, not in ten minutes.
    shapes = {n: [replace(base, **{n: getattr(base, n) * f}) for f in factors] for n in chosen}
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    seed = time.time_ns() % 2**31 if seed is None else seed
    tell("measuring the device")
    found = rates(device, (dtype_name(dtype),))
    points: dict[str, tuple[Point, ...]] = {}
    try:
        for name, i, shape in ((n, i, shape) for n in chosen for i, shape in enumerate(shapes[n])):
            tell(f"{name}: {getattr(shape, name)}")
            ends, rate = i in (0, len(factors) - 1), found.matmul[dtype_name(dtype)]
            point = _measure(shape, device, dtype, seed, rate, budget[device.type], profile and ends)
            row = points.get(name, ())
            if row and point.seconds is not None:
                ratio = point.seconds / row[0].seconds if row[0].seconds else None
                point = replace(point, ratio=ratio, flops_ratio=shape.flops / row[0].shape.flops)
            points[name] = (*row, point)
    except KeyboardInterrupt:
        return Sweeps(found, device, dtype, base, points, interrupted=True)
    return Sweeps(found, device, dtype, base, points)


class TrainingRun:
    """Calling it runs `shape.steps` steps and returns the last loss. Gradients are dropped before each step.

    Attributes:
        weights: one [dim, dim] a layer.
        inputs: [batch, dim], of every step.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, generator=generator)

        self.steps = shape.steps
        # With this variance the activations have the same size in all layers.
        scale = (2 / shape.dim) ** 0.5
        self.weights = [(normal(shape.dim, shape.dim) * scale).to(dtype) for _ in range(shape.layers)]
        for weight in self.weights:
            weight.requires_grad_()
        self.inputs = normal(shape.batch, shape.dim).to(dtype)

    def __call__(self) -> torch.Tensor:
        loss = self.inputs
        for _ in range(self.steps):
            for weight in self.weights:
                weight.grad = None
            x = self.inputs
            for weight in self.weights:
                x = F.gelu(x @ weight)
            loss = x.float().square().mean()
            loss.backward()
        return loss.detach()


def _measure(
    shape: Shape, device: torch.device, dtype: torch.dtype, seed: int, rate: float, budget: float, profile: bool
) -> Point:
    """The median of as many runs as fit into `budget` seconds, at least three. As the first point of a sweep."""
    run: Any = None
    try:
        run = TrainingRun(shape, device, dtype, seed)
        seconds_of(run, device)
        runs = max(3, min(_MOST_RUNS, int(budget / seconds_of(run, device))))
        seconds = statistics.median(seconds_of(run, device) for _ in range(runs))
        # A tensor among the arguments tells the profiler of the GPU.
        ran = kernels_that_ran(lambda _: run(), [torch.empty(0, device=device)]) if profile else ()
    except torch.OutOfMemoryError:
        return Point(shape, reason="out of memory")
    finally:
        run = None  # frees its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Point(shape, seconds, 1.0, 1.0, shape.flops / seconds / rate, ran)
