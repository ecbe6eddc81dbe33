"""Time and check the plans of a job on the GPU that is here."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from nanovllm.hardware.timing import time_in_graph
from nanovllm.kernels.op.provider import Provider
from nanovllm.kernels.testing.compare import argument_sets
from nanovllm.kernels.testing.verify import Case, verify
from nanovllm.tune.jobs import TuningJob, neighbour, shortened
from nanovllm.tune.launches import compile_together
from nanovllm.tune.search import Skipped

R = TypeVar("R")
VERIFIED_LENGTH = 700
"""Tokens a sequence in the check of an attention plan, whose reference in float64 holds all scores."""
_CALLS = 8
"""Calls in a graph at least, so that its launch costs little."""


class TuningError(RuntimeError):
    """A plan failed and may have taken the device with it, or the kernel looks up another key than expected."""


class JobTimer:
    """Measures and verifies plans of one job. There are enough inputs that each call finds a cold L2 cache.

    Args:
        clock: (calls, rounds) -> what a call takes.
    """

    def __init__(self, job: TuningJob, device: torch.device, clock: Callable[..., Any] = time_in_graph) -> None:
        self._job, self._device, self._clock = job, device, clock
        self._sets = [argument_sets(job.op, Case(shape, job.dtype, job.variant), device) for shape in job.shapes]

    def measure(self, plan: Any, rounds: int) -> float:
        """Seconds of a call: the geometric mean over the job's shapes of the median of `rounds` replays of a graph.

        Raises:
            Skipped: the plan does not compile or launch.
        """
        job, medians = self._job, []
        with job.tunable.using(self._device, job.key, plan) as keys:
            for sets in self._sets:
                calls = [partial(job.provider.fn, **job.op.records.group(s)) for s in sets]
                calls *= max(1, _CALLS // len(sets))
                medians.append(self._tried(plan, partial(self._clock, calls, rounds)).median)
        if job.key not in keys:
            raise TuningError(f"{job.op.name} did not look up {job.tunable.name} {job.key}, but {keys[:1]}")
        return statistics.geometric_mean(medians)

    def verify(self, plan: Any) -> None:
        """Compare with the reference in float64, with the job's shape of the most rows and one that is a row shorter.

        Raises:
            Skipped: the results are wrong, or memory around them was written to.
        """
        job = self._job
        shape = shortened(job.op, max(job.shapes, key=lambda s: s[0]), VERIFIED_LENGTH)
        provider = Provider(job.provider.name, job.provider.fn)
        with job.tunable.using(self._device, job.key, plan):
            for tested in filter(None, (shape, neighbour(shape))):
                case = Case(tested, job.dtype, job.variant, seed=1)
                failure = self._tried(plan, partial(verify, job.op, provider, self._device, case)).failure
                if failure and "CUDA error" in failure:
                    raise TuningError(f"{job}: {plan} failed in a way that ends the run: {failure}")
                if failure:
                    raise Skipped(f"wrong result: {case}: {failure}")
        torch.cuda.empty_cache()

    def prepare(self, plans: Sequence[Any]) -> None:
        """Compile what the plans launch, on all cores."""
        job = self._job

        def call(plan: Any, arguments: dict[str, Any]) -> None:
            with job.tunable.using(self._device, job.key, plan):
                job.provider.fn(**job.op.records.group(arguments))

        calls = [partial(call, plan, sets[0]) for plan in plans for sets in self._sets]
        compile_together(calls, min(32, os.cpu_count() or 1))

    def alive(self) -> bool:
        """Whether the device still computes: after an illegal memory access no call of this process succeeds."""
        try:
            return torch.ones(8, device=self._device).sum().item() == 8
        except RuntimeError:
            return False

    def _tried(self, plan: Any, call: Callable[[], R]) -> R:
        try:
            return call()
        except Exception as e:
            reason = reason_of(e)
            if reason is None:
                raise TuningError(f"{self._job}: {plan} failed in a way that ends the run: {e}") from e
            raise Skipped(reason) from e


def reason_of(error: Exception) -> str | None:
    """Why a plan that raised this cannot be used; None: the error is not the plan's, or the device is lost."""
    name, text = type(error).__name__, str(error).strip()
    line = text.splitlines()[-1] if text else name
    if name == "OutOfResources":
        return f"out of {getattr(error, 'name', 'resources')}: {line}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of device memory: {line}"
    of_compiler = type(error).__module__.startswith("triton") or name in ("CompilationError", "PTXASError")
    if of_compiler or "PassManager::run failed" in text:
        return f"does not compile: {line}"
    return f"refused: {line}" if isinstance(error, ValueError) else None
