"""Whether a way of a lesson is right: against float64, on fresh random numbers, at odd sizes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from nanovllm.kernels.testing.memory_guard import MemoryGuard
from nanovllm.lab.lesson import TOLERANCE, Inputs, Lesson
from nanovllm.lab.ways import Way
from nanovllm.wording import are

SHAPES = ((1, 1), (3, 7), (1, 96), (7, 129), (33, 160))
"""(rows, dim): one element, less than a vector, rows that are not aligned, more than one tile."""
LARGE_SHAPES = ((5, 1000), (2, 4097), (130, 1544), (3, 16384))
"""Further shapes on a GPU."""
_SAMPLED_ROWS = 8


@dataclass(frozen=True)
class WayCheck:
    """The check of one way.

    Attributes:
        cases: the number of shapes compared.
        error: the worst error of an element over what is allowed: the tolerance times (its value + the typical value of
            its row).
        failures: what was wrong, a line a case.
        reason: why nothing was compared.
        how: "interpreter" if Triton's interpreter ran the kernel.
    """

    way: str
    cases: int = 0
    error: float = 0.0
    failures: tuple[str, ...] = ()
    reason: str | None = None
    how: str = ""


def check(
    lesson: Lesson, way: Way, device: torch.device, dtype: torch.dtype, seed: int, limit: int | None = None
) -> WayCheck:
    """Compare a way with the reference on every shape.

    Args:
        seed: the seed of the random inputs; each shape gets others.
        limit: leave out larger dims.
    """
    if way.call is None:
        return WayCheck(way.name, reason=way.reason)
    shapes = SHAPES + (LARGE_SHAPES if device.type == "cuda" else ())
    if way.name == "compile":  # a compilation takes seconds, and torch.compile is not what is taught
        shapes = SHAPES[3:4]
    if way.name == "plain" and lesson.plain_limit is not None:
        limit = min(limit or lesson.plain_limit[0], lesson.plain_limit[0])
    worst, failures, cases = 0.0, [], 0
    for i, (rows, dim) in enumerate(s for s in shapes if limit is None or s[1] <= limit):
        generator = torch.Generator(device).manual_seed(seed + i)
        error, failure = compare(lesson, way, lesson.inputs(rows, dim, dtype, device, generator))
        worst, cases = max(worst, error), cases + 1
        if failure is not None:
            failures.append(f"{rows}x{dim}: {failure}")
    return WayCheck(way.name, cases, worst, tuple(failures))


def compare(lesson: Lesson, way: Way, inputs: Inputs) -> tuple[float, str | None]:
    """(error over what is allowed, what was wrong or None) of one call, with its outputs poisoned and guarded."""
    assert way.call is not None
    before = [t.clone() for t in inputs]
    # With the guard torch.compile would compile another kernel.
    guarded = contextlib.nullcontext() if way.name == "compile" else MemoryGuard()
    with torch.inference_mode(), guarded as guard:
        got = way.call(*inputs)
    if guard is not None and (damage := guard.check()) is not None:
        return torch.inf, damage
    if any(not torch.equal(a, b) for a, b in zip(inputs, before)):
        return torch.inf, "wrote to its argument"
    dtype = inputs[0].dtype
    if got.dtype != dtype:
        return torch.inf, f"gave {got.dtype} instead of {dtype}"
    error, failure = difference(got, lesson.exact(*(t.double() for t in inputs)))
    if failure is None and got.is_cuda:
        with torch.inference_mode():
            again = way.call(*inputs)
        if not torch.equal(got, again):
            return torch.inf, "gave another result the second time"
    return error, failure


def compare_rows(lesson: Lesson, way: Way, inputs: Inputs) -> tuple[float, str | None]:
    """`compare` for large inputs: only some rows of the result, among them the first and the last."""
    assert way.call is not None
    first, *others = inputs
    with torch.inference_mode():
        got = way.call(*inputs)
        rows = torch.linspace(0, len(first) - 1, min(len(first), _SAMPLED_ROWS), device=first.device).long()
        return difference(got[rows], lesson.exact(first[rows].double(), *(t.double() for t in others)))


def difference(got: torch.Tensor, want: torch.Tensor) -> tuple[float, str | None]:
    """(the worst error over what is allowed, what is wrong if that is above 1). want: in float64."""
    if got.shape != want.shape:
        return torch.inf, f"gave the shape {list(got.shape)} instead of {list(want.shape)}"
    typical = want.square().mean(-1, keepdim=True).sqrt()
    # Results below the smallest normal number may be flushed to zero.
    allowed = TOLERANCE[got.dtype] * (want.abs() + typical) + torch.finfo(got.dtype).tiny
    error = ((got.double() - want).abs() / allowed).nan_to_num(nan=torch.inf)
    worst = float(error.max())
    if worst <= 1:
        return worst, None
    at = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
    count = int((error > 1).sum())
    wrong = f"{count} of {error.numel()} elements {are(count)} wrong"
    return worst, f"{got[at]:.6g} instead of {want[at]:.6g} at {list(at)}; {wrong}"


def error_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
