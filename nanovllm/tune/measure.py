"""Time and check the plans of a job on the GPU that is here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nanovllm.hardware.timing import l2_bytes, time_in_graph
from nanovllm.kernels.op.declaration import Arguments, copy_of, nbytes
from nanovllm.kernels.op.provider import Provider
from nanovllm.kernels.testing.verify import Case, verify
from nanovllm.tune.jobs import VERIFIED_LENGTH, Job, neighbour
from nanovllm.tune.launches import compile_together
from nanovllm.tune.search import Skipped

_MOST_SETS = 60
_MOST_BYTES = 8 << 30
_CALLS = 8
"""Calls in a graph at least, so that its launch costs little."""


class TuningError(RuntimeError):
    """A plan failed and may have taken the device with it, or the kernel does not do what is expected of it."""


class JobTimer:
    """Measures and verifies plans of one job. There are enough inputs that each call finds a cold L2 cache."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device
        declared = job.target.declared
        self._sets = [
            self._argument_sets(Case(shape, job.dtype, job.variant).arguments(declared, device)) for shape in job.shapes
        ]

    def measure(self, plan: Any, rounds: int) -> float:
        """Seconds of a call: the geometric mean over the job's shapes of the median of `rounds` replays of a graph.

        Raises:
            Skipped: the plan does not compile or launch.
        """
        logs = []
        fn, group = self._job.target.launcher.fn, self._job.target.declared.records.group
        with self._job.tunable.using(self._device, self._job.key, plan) as asked:
            for sets in self._sets:
                calls = [partial(fn, **group(s)) for s in sets] * max(1, _CALLS // len(sets))
                timing = self._tried(plan, partial(time_in_graph, calls, rounds))
                logs.append(math.log(timing.median))
        if self._job.key not in asked:
            wanted = f"{self._job.tunable.name} {self._job.key}"
            raise TuningError(f"{self._job.target.op} did not ask for {wanted}; it asked for {asked[:1]}")
        return math.exp(sum(logs) / len(logs))

    def verify(self, plan: Any) -> None:
        """Compare with the reference in float64, with the job's shape of the most rows and one that is a row shorter.

        Raises:
            Skipped: the results are wrong, or memory around them was written to.
        """
        job = self._job
        shape = job.target.shrink(max(job.shapes, key=lambda s: s[0]), VERIFIED_LENGTH)
        launcher = Provider(job.target.launcher.name, job.target.launcher.fn)
        with job.tunable.using(self._device, job.key, plan):
            for tested in filter(None, (shape, neighbour(shape))):
                case = Case(tested, job.dtype, job.variant, seed=1)
                verdict = self._tried(plan, partial(verify, job.target.declared, launcher, self._device, case))
                if verdict.failure and "CUDA error" in verdict.failure:
                    raise TuningError(f"{job}: {plan} failed in a way that ends the run: {verdict.failure}")
                if verdict.failure:
                    raise Skipped(f"wrong result: {case}: {verdict.failure}")
        torch.cuda.empty_cache()

    def prepare(self, plans: Sequence[Any]) -> None:
        """Compile what the plans launch, on all cores."""
        job = self._job
        sets = [s[0] for s in self._sets]

        def call(plan: Any, arguments: Arguments) -> Callable[[], None]:
            def run() -> None:
                with job.tunable.using(self._device, job.key, plan):
                    job.target.launcher.fn(**job.target.declared.records.group(arguments))

            return run

        compile_together([call(p, a) for p in plans for a in sets], min(32, os.cpu_count() or 1))

    def alive(self) -> bool:
        """Whether the device still computes: after an illegal memory access no call of this process succeeds."""
        try:
            return torch.ones(8, device=self._device).sum().item() == 8
        except RuntimeError:
            return False

    def _tried(self, plan: Any, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as e:
            reason = reason_of(e)
            if reason is None:
                raise TuningError(f"{self._job}: {plan} failed in a way that ends the run: {e}") from e
            raise Skipped(reason) from e

    def _argument_sets(self, first: Arguments) -> list[Arguments]:
        """The arguments and copies of them: between two uses of one, the others pass through the L2 cache."""
        declared = self._job.target.declared
        size = nbytes(*(v for v in first.values() if isinstance(v, torch.Tensor)))
        touched = size if declared.cost is None else min(size, declared.cost(**first).bytes)
        wanted = 5 * l2_bytes(self._device) // 2 // max(1, touched) + 1
        most = max(1, min(_MOST_SETS, _MOST_BYTES // max(1, size)))
        copies = [
            {k: copy_of(v) if isinstance(v, torch.Tensor) else v for k, v in first.items()}
            for _ in range(min(most, wanted) - 1)
        ]
        return [first, *copies]


def reason_of(error: Exception) -> str | None:
    """Why a plan that raised this cannot be used; None: the error is not the plan's, or the device is lost."""
    name, text = type(error).__name__, str(error).strip()
    line = text.splitlines()[-1] if text else name
    if name == "OutOfResources":
        return f"out of {getattr(error, 'name', 'resources')}: {line}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of device memory: {line}"
    if type(error).__module__.startswith("triton") or name in ("CompilationError", "PTXASError"):
        return f"does not compile: {line}"
    if isinstance(error, RuntimeError) and "PassManager::run failed" in text:
        return f"does not compile: {line}"
    if isinstance(error, ValueError):
        return f"refused: {line}"
    return None
