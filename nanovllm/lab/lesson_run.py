"""A lesson from beginning to end: check, time, profile, and read the PTX of the compilers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanovllm.hardware.gpu_presets import DeviceModel, device_model, this_device
from nanovllm.hardware.versions import versions
from nanovllm.kernels.op.availability import triton_support
from nanovllm.lab.check import WayCheck, check, error_line
from nanovllm.lab.interpret import check_here, check_interpreted
from nanovllm.lab.lesson import Lesson, dtype_name
from nanovllm.lab.lesson_ptx import cuda_reading, triton_reading
from nanovllm.lab.ptx import Reading, explained, resources_in_words
from nanovllm.lab.way_timing import Limits, WayRow, check_sizes, limits, measure
from nanovllm.lab.ways import Way, check_names, ways

_COMPILED_DEFAULT = "h100"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Listing:
    """The PTX of one way for one GPU, or the reason why there is none."""

    way: str
    dim: int
    dtype: torch.dtype
    ptx: str = ""
    reading: Reading | None = None
    reason: str | None = None


@dataclass(frozen=True)
class LessonResult:
    """A lesson that was run.

    Attributes:
        rows: every way at every size.
        listings: PTX for `gpu`.
        interrupted: Ctrl-C ended the run, so that checks, rows or listings are missing.
    """

    lesson: Lesson
    device: torch.device
    dtype: torch.dtype
    seed: int
    limits: Limits
    checks: tuple[WayCheck, ...]
    rows: tuple[WayRow, ...]
    gpu: DeviceModel
    listings: tuple[Listing, ...]
    interrupted: bool = False

    @property
    def wrong(self) -> list[str]:
        """What was found wrong, a line each."""
        rows = [r for r in self.rows if r.reason is not None and r.reason.startswith(("wrong: ", "failed: "))]
        checks = [f"{c.way}: {failure}" for c in self.checks for failure in c.failures]
        return checks + [f"{r.way} at {r.dim}: {r.reason}" for r in rows]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "lesson": self.lesson.name, "formula": self.lesson.formula, "device": self.limits.device,
            "dtype": dtype_name(self.dtype), "seed": self.seed, "versions": versions(),
            "limits": {"bytes_per_second": self.limits.bandwidth, "matmul_flops_per_second": self.limits.matmul},
            "checks": [asdict(c) for c in self.checks], "rows": [r.as_dict() for r in self.rows],
            "compiled_for": self.gpu.name, "ptx": [
                {
                    "way": x.way, "dim": x.dim, "dtype": dtype_name(x.dtype), "reason": x.reason, "ptx": x.ptx,
                    "reading": x.reading and asdict(x.reading),
                    "lines": [asdict(line) for line in explained(x.reading)] if x.reading else [],
                    "resources": resources_in_words(x.reading, self.gpu) if x.reading else [],
                }
                for x in self.listings
            ],
        }  # fmt: skip


def run(
    lesson: Lesson,
    device: torch.device,
    dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    gpu: str | None = None,
    seed: int | None = None,
    refresh: bool = False,
    tell: Tell = lambda line: None,
) -> LessonResult:
    """Run a lesson. Ctrl-C ends it, and the result has what is there.

    Args:
        dtype: one of the lesson's; None: its first, on a CPU float32.
        sizes: dims to time, 1 to 32768.
        names: the names of the ways; None: all.
        gpu: compile PTX for it, such as "h100"; None: the GPU that is here, else an H100.
        seed: the seed of the random inputs; None: another one each time.
        refresh: measure the limits of the device again.
        tell: is called with what is being done, since a run may take a minute.

    Raises:
        ValueError: an argument has a value that is not possible.
    """
    on_cpu = device.type == "cpu"  # most processors multiply 16 bits slowly
    compiled_dtype = dtype if dtype in lesson.dtypes else lesson.dtypes[0]
    dtype = dtype or (torch.float32 if on_cpu else lesson.dtypes[0])
    taken = dict.fromkeys((*lesson.dtypes, torch.float32)) if on_cpu else lesson.dtypes
    if dtype not in taken:
        raise ValueError(f"dtype: {lesson.name} takes {', '.join(map(dtype_name, taken))}, not {dtype_name(dtype)}")
    dims, chosen = check_sizes(sizes, device), check_names(names)
    model = this_device(device) if gpu is None and not on_cpu else device_model(gpu or _COMPILED_DEFAULT)
    seed = time.time_ns() % 2**31 if seed is None else seed
    tell("measuring the device")
    limit = limits(lesson, device, dtype, refresh)
    if "cuda" in chosen:
        tell("compiling CUDA C++")
    checks: list[WayCheck] = []
    usable: list[Way] = []
    rows: list[WayRow] = []
    listings: list[Listing] = []
    interrupted = False
    try:
        for way in ways(lesson, device, dtype, chosen):
            tell(f"checking {way.name}")
            checks.append(_check(lesson, way, device, dtype, seed))
            usable.append(_unless_wrong(way, checks[-1]))
        for dim in dims:
            for way in usable:
                tell(f"timing {way.name} at {dim}")
                rows.append(measure(lesson, way, dim, device, dtype, limit, seed))
        for name in ("cuda", "triton"):
            if name in chosen:
                tell(f"compiling {name} for {model.name}")
                listings.append(_listing(lesson, name, dims[-1], compiled_dtype, model))
    except KeyboardInterrupt:
        interrupted = True
    found = tuple(checks), tuple(rows), model, tuple(listings), interrupted
    return LessonResult(lesson, device, dtype, seed, limit, *found)


def _check(lesson: Lesson, way: Way, device: torch.device, dtype: torch.dtype, seed: int) -> WayCheck:
    if way.name == "triton" and device.type == "cpu":
        if triton_support(device) is None:
            return check_here(lesson, dtype, seed)
        if importlib.util.find_spec("triton") is None:
            return WayCheck("triton", reason=way.reason)
        return check_interpreted(lesson, dtype, seed)
    try:
        return check(lesson, way, device, dtype, seed)
    except torch.OutOfMemoryError:
        return WayCheck(way.name, reason="out of memory")
    except Exception as error:  # a way that fails is a row of the table; the others are still of use
        said = error_line(error)
        if way.name == "compile":  # most often there is no C++ compiler
            return WayCheck(way.name, reason=f"torch.compile failed: {said}")
        return WayCheck(way.name, failures=(said,))


def _unless_wrong(way: Way, found: WayCheck) -> Way:
    """The way, without its call if the check says that its time would mean nothing."""
    if found.failures:
        return Way(way.name, None, "not timed, as it is wrong: see above")
    if found.how == "interpreter":
        return Way(way.name, None, "checked in Triton's interpreter, whose time says nothing")
    return way if found.reason is None else Way(way.name, None, found.reason)


def _listing(lesson: Lesson, name: str, dim: int, dtype: torch.dtype, gpu: DeviceModel) -> Listing:
    reader = cuda_reading if name == "cuda" else triton_reading
    try:
        ptx, reading = reader(lesson, dim, dtype, divmod(gpu.capability, 10))
    except (RuntimeError, ValueError) as error:
        return Listing(name, dim, dtype, reason=str(error).splitlines()[0])
    return Listing(name, dim, dtype, ptx, reading)
