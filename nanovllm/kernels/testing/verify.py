"""Whether a provider is right: every case of an op's inputs, against the reference in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.inputs import Arguments, Inputs, Shape, Tensors, copy_of, written
from nanovllm.kernels.op.provider import KernelError, Provider
from nanovllm.kernels.op.result_check import result_name, unlike_results, unlike_tensor
from nanovllm.kernels.testing.crash_report import what_failed
from nanovllm.kernels.testing.masked_loads import MaskedLoads
from nanovllm.kernels.testing.memory_guard import MemoryGuard
from nanovllm.kernels.testing.race_watch import race_watch
from nanovllm.wording import are

_FEW, _ROW, _LARGE = 8, 16, 3.0


@dataclass(frozen=True)
class Case:
    """One call: its shape, dtype, and how its numbers are drawn and laid out (`strided`, `apart`: as in `Tensors`).

    Attributes:
        leading: of tensors whose pattern begins with "...", the dimensions in place of the first, whose product is the
            first number of the shape; () takes that dimension away. None: the op's inputs as they are made.
    """

    shape: Shape
    dtype: torch.dtype
    variant: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    scale: float = 1.0
    strided: bool = False
    apart: bool = False
    seed: int = 0
    leading: Shape | None = None

    def __str__(self) -> str:
        words = [written(self.shape), str(self.dtype).removeprefix("torch.")]
        words += [f"{k}={v}" for k, v in self.variant.items()]
        words += [f"scale {self.scale:g}"] if self.scale != 1 else []
        words += ["elements apart" if self.apart else "strided"] if self.strided else []
        if self.leading is not None:
            first = self.shape[0]
            words += [f"with {first} as {written(self.leading)}" if self.leading else f"without the {first}"]
        return " ".join(words)

    def arguments(self, declared: Op, device: torch.device) -> Arguments:
        """New tensors for the call, by argument name."""
        assert declared.inputs is not None
        tensors = Tensors(self.dtype, device, self.seed, self.scale, self.strided, self.apart)
        made = declared.inputs(tensors, self.shape, self.variant)
        if self.leading is None:
            return made
        return {name: self._led(value) if declared.check.leads(name, value) else value for name, value in made.items()}

    def _led(self, x: torch.Tensor) -> torch.Tensor:
        """x with the dimensions `leading` in place of its first. In a strided case they lie in the opposite order in
        memory, so that the rows have no common stride.
        """
        assert self.leading is not None
        if x.shape[0] != math.prod(self.leading):
            return x
        if not self.strided:
            return x.view((*self.leading, *x.shape[1:]))  # of one tuple: () is a shape too
        n = len(self.leading)
        return x.view((*self.leading[::-1], *x.shape[1:])).permute((*reversed(range(n)), *range(n, n + x.dim() - 1)))


@dataclass(frozen=True)
class Verdict:
    """How a provider did on one case. `error` is its largest error over what the tolerance allows; above 1 it fails."""

    case: Case
    error: float = 0.0
    failure: str | None = None
    skipped: str | None = None
    raised: bool = False
    """Whether an exception ended the case, so that there are no numbers."""


def cases(declared: Op, full: bool, seed: int = 0, quick: bool = False) -> Iterator[Case]:
    """The cases to verify: all dtypes, shapes, variants, magnitudes and layouts, without every combination of them.

    Args:
        full: the shapes of decode steps and large ones too, which want a GPU.
        quick: each dtype and small shape once, with one variant and layout, by turns.
    """
    inputs = declared.inputs
    if inputs is None:
        return
    leads = declared.check.patterns_lead
    if quick:
        turns = min(3, len(inputs.dtypes) * len(inputs.small))
        for j, dtype in enumerate(inputs.dtypes):
            for i, shape in enumerate(inputs.small):
                variant = inputs.variants[(i + j) % len(inputs.variants)]
                case = Case(shape, dtype, variant, strided=(i + j) % 2 == 1, seed=seed)
                yield _led(case, inputs) if leads and (i + j + 1) % turns == 0 else case
        return
    shapes = [*inputs.small, *((*inputs.decode, *inputs.large) if full else ())]
    for dtype in inputs.dtypes:
        for i, shape in enumerate(shapes):
            for variant in inputs.variants:
                yield Case(shape, dtype, variant, seed=seed)
            # Layout and magnitude with one variant each, in turn.
            if i < len(inputs.small):
                variant = inputs.variants[i % len(inputs.variants)]
                yield Case(shape, dtype, variant, strided=True, seed=seed + 1)
                if dtype == inputs.dtypes[i % len(inputs.dtypes)]:
                    yield Case(shape, dtype, variant, strided=True, apart=True, seed=seed + 1)
                if leads and dtype == inputs.dtypes[(i + 1) % len(inputs.dtypes)]:
                    led = _led(Case(shape, dtype, variant, strided=i % 2 == 0, seed=seed + 3), inputs)
                    yield from [led] if led.leading is not None else []
                for scale in inputs.scales:
                    if scale != 1:
                        yield Case(shape, dtype, variant, scale=scale, seed=seed + 2)


def _led(case: Case, inputs: Inputs) -> Case:
    """The case with other leading dimensions: none in place of one row, else 2 x 3; as it is if it has no row."""
    shape = (6, *case.shape[1:])
    if not case.shape or not case.shape[0]:
        return case
    if case.shape[0] == 1:
        return dataclasses.replace(case, leading=())
    return case if inputs.wrong_with(shape) else dataclasses.replace(case, shape=shape, leading=(2, 3))


def verify(declared: Op, provider: Provider, device: torch.device, case: Case) -> Verdict:
    """Run one case and compare results, written arguments and surroundings with what they should be.

    In Triton's interpreter, elements that a masked load leaves out are NaN unless the kernel gives `other`.
    """
    loads = MaskedLoads()
    verdict = _verify(declared, provider, device, case, loads)
    if verdict.failure is None or not loads.places:
        return verdict
    plain = _verify(declared, provider, device, case, MaskedLoads(only=()))
    if plain.failure is not None:
        return plain
    used = (p for p in loads.places if _verify(declared, provider, device, case, MaskedLoads(only=[p])).failure)
    what = f"used elements that a masked load leaves out{next(used, '')}"
    return dataclasses.replace(verdict, failure=f"{what}: on a GPU they may hold anything; give the load `other=`")


def _verify(declared: Op, provider: Provider, device: torch.device, case: Case, loads: MaskedLoads) -> Verdict:
    arguments = case.arguments(declared, device)
    bound = declared.bind(arguments)
    try:
        reason = declared.refusal(provider, *bound.args, **bound.kwargs)
    except KernelError as e:
        return Verdict(case, failure=str(e), raised=True)
    if reason is not None:
        return Verdict(case, skipped=reason)
    try:
        expected = _reference(declared, arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return Verdict(case, failure=f"the reference failed: {what_failed(e)}", raised=True)
    guard = MemoryGuard()
    given = guard.surrounded(arguments)
    bound = declared.bind(given)
    try:
        with guard, race_watch() as watch, loads:
            got = provider.fn(*bound.args, **bound.kwargs)
        damage = guard.check()
    except Exception as e:
        return Verdict(case, failure=what_failed(e), raised=True)
    race = None if watch is None else watch.race
    if damage is not None or race is not None:
        return Verdict(case, failure=damage or race)
    for name, value in arguments.items():
        mine = not isinstance(value, torch.Tensor) or name in (*declared.mutates, *declared.reuses)
        if not mine and not _same(value, given[name]):
            return Verdict(case, failure=f"wrote to its argument {name}; write to a new tensor, torch.empty_like(...)")
    if declared.compare is not None:
        return Verdict(case, failure=declared.compare(got, arguments, case.dtype))
    if (unlike := unlike_results(got, len(expected) - len(declared.mutates))) is not None:
        return Verdict(case, failure=unlike)
    results = [*results_of(got), *(given[name] for name in declared.mutates)]
    return _compare(declared, case, results, expected, arguments)


def verify_case(declared: Op, provider: Provider, device: torch.device, case: Case) -> Verdict:
    """`verify`, then the GPU's cached memory is freed. It is a failure too if the reference runs out of memory."""
    try:
        verdict = verify(declared, provider, device, case)
    except torch.OutOfMemoryError as e:
        verdict = Verdict(case, failure=f"{type(e).__name__}: {e}", raised=True)
    if device.type == "cuda":
        with suppress(RuntimeError):  # after an illegal access, which is the verdict, this fails too
            torch.cuda.empty_cache()
    return verdict


def lacks_memory(verdict: Verdict) -> bool:
    """Whether a case failed because there was too little memory."""
    return (verdict.failure or "").startswith(torch.OutOfMemoryError.__name__)


def verify_op(declared: Op, provider: Provider, device: torch.device | str, seed: int = 0) -> list[Verdict]:
    """`verify` on every case, on a GPU the large ones too.

    Raises:
        ValueError: the provider cannot run on this device; with its reason.
    """
    device = torch.device(device)
    if (reason := provider.support(device)) is not None:
        raise ValueError(f"nothing was verified: {provider.name}: {reason}")
    return [verify_case(declared, provider, device, case) for case in cases(declared, device.type == "cuda", seed)]


def _reference(declared: Op, arguments: Arguments) -> list[torch.Tensor]:
    """Results of the reference in float64, then the arguments that it wrote to."""
    wide = {k: v.double() if _is_float(v) and v.element_size() > 1 else v for k, v in arguments.items()}
    wide = _copied(wide, declared.mutates)
    if declared.compare is not None:
        return []
    bound = declared.bind(wide)
    results = results_of(declared.native(*bound.args, **bound.kwargs))
    return [*results, *(wide[name] for name in declared.mutates)]


def _compare(
    declared: Op, case: Case, results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], arguments: Arguments
) -> Verdict:
    worst, where = 0.0, ""
    tolerance = declared.tolerance[case.dtype]
    for i, (got, want) in enumerate(zip(results, expected), 1):
        name = result_name(i, len(results))
        dtype = case.dtype if _is_float(want) and got.element_size() > 1 else None
        if (unlike := unlike_tensor(name, got, want.shape, dtype)) is not None:
            return Verdict(case, failure=unlike)
        if not got.numel():
            continue
        if not _is_float(want):
            if not torch.equal(got, want):
                return Verdict(case, failure=f"{name} differs")
            continue
        magnitude = declared.magnitude
        if declared.cancels and want.shape[-1] < _FEW:
            magnitude = max(magnitude, _magnitude(arguments))
        errors = _errors(got.double(), want.double(), tolerance, magnitude, torch.finfo(case.dtype))
        row = f"the root of the mean square of {name}'s errors in row"
        for error, description in zip(errors, (f"{name} at", row)):
            largest = float(error.max())
            if largest > max(worst, 1.0):
                where = _describe_worst(description, error, got, want)
            worst = max(worst, largest)
    return Verdict(case, worst, f"error {worst:.3g} times the tolerance: {where}" if not worst <= 1 else None)


def _describe_worst(what: str, error: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    at = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
    wrong = int((error > 1).sum())
    if error.dim() < want.dim():
        row = f"{what} {list(at)}" if at else what.removesuffix(" in row")
        off = float((got.double() - want.double())[at].square().mean().sqrt())
        allowed = f"{off:.2g}, allowed {off / float(error[at]):.2g}"
        return f"{row} is {allowed}; {wrong} of {error.numel()} rows {are(wrong)} wrong"
    counts = f"{wrong} of {error.numel()} elements {are(wrong)} wrong"
    return f"{what} {list(at)} is {got[at]:.6g} instead of {want[at]:.6g}; {counts}"


def _errors(
    got: torch.Tensor, want: torch.Tensor, tolerance: float, magnitude: float, info: torch.finfo
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each element's error, and each row's (the root of the mean square), over what is allowed.

    An element may be off by the tolerance times its value, plus the tolerance times a large value of its row (the
    largest, at most _LARGE times the root of the mean square): it may be a difference of such values, each of which was
    rounded. A row of at least _ROW elements may be off as a whole by the tolerance times the root of its mean square,
    which a loss of precision in every element exceeds long before any element does; of a few elements one may be most
    of it, so a short row may be off by a little more.
    """
    overflows = want.abs() > info.max
    agree = (got == want) | (got.isnan() & want.isnan()) | (overflows & (got.isinf() | (got.abs() >= 0.99 * info.max)))
    finite = torch.where(overflows | ~want.isfinite(), 0.0, want)
    # float16 keeps subnormals, the others may be flushed to zero.
    smallest = 2.0**-24 if info.bits == 16 and info.max < 1e5 else info.tiny
    error = torch.where(agree, 0.0, (got - want).abs())
    rows, values = (error, finite) if want.dim() else (error[None], finite[None])
    root = values.square().mean(-1, keepdim=True).sqrt()
    large = torch.minimum(values.abs().amax(-1, keepdim=True), _LARGE * root).clamp_min(magnitude)
    of_elements = error / (
        tolerance * (finite.abs() + large.view(want.shape[:-1] + (1,) * min(want.dim(), 1))) + smallest
    )
    if values.shape[-1] < _ROW:
        return of_elements.nan_to_num(nan=torch.inf, posinf=torch.inf), torch.zeros(1, device=got.device)
    few = 1 + 4 / values.shape[-1]
    of_rows = rows.square().mean(-1).sqrt() / (few * tolerance * root[..., 0].clamp_min(magnitude) + smallest)
    return of_elements.nan_to_num(nan=torch.inf, posinf=torch.inf), of_rows.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _magnitude(arguments: Arguments) -> float:
    """The root of the mean square of the argument where that is largest; of its finite numbers."""
    roots = [0.0]
    for value in arguments.values():
        if _is_float(value):
            wide = value.double()
            wide = wide[wide.isfinite()]
            roots += [float(wide.square().mean().sqrt())] if wide.numel() else []
    return max(roots)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def results_of(results: Any) -> list[torch.Tensor]:
    """What an op returned, as a list."""
    if results is None:
        return []
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _copied(arguments: Arguments, names: Sequence[str]) -> Arguments:
    """The arguments, with copies (same strides) in place of those named."""
    return {k: copy_of(v) if k in names else v for k, v in arguments.items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.element_size() == 1 and a.is_floating_point():
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))
