"""From a list of jobs to entries of a file: the time is shared out, each job searched, each result written when it is there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.hardware.versions import provenance
from nanovllm.kernels.op.config_files import gpu_of
from nanovllm.tune.measure import Bench, TuningError
from nanovllm.tune.pruning import Candidates, candidates
from nanovllm.tune.resume import ContextLost, Earlier, watched
from nanovllm.tune.search import Budget, Outcome, search
from nanovllm.tune.store import entry, mend, save
from nanovllm.tune.targets import Job

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel


LEAST_SECONDS = 3.0
"""About what the first batch of plans takes, mostly to compile. A job that has less compiles fewer together."""
MEASURED = "measured before, with these versions and kernels"
FATAL = "an earlier run ended while it was measured; without --resume it is tried again"


@dataclass(frozen=True)
class Result:
    """What came of one job. `entry` is None if nothing that is right was found; `reason` says why nothing was tried."""

    job: Job
    candidates: Candidates | None
    outcome: Outcome[Any] | None
    entry: dict[str, Any] | None
    reason: str | None = None


def tune(
    jobs: Sequence[Job],
    device: torch.device,
    model: DeviceModel,
    out: Path,
    *,
    strategy: str = "exhaustive",
    seed: int = 0,
    limit: float | None = None,
    budget: Budget | None = None,
    resume: bool = False,
    bench: Callable[[Job, torch.device], Bench] = Bench,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Search each job and write what was found, job by job, so that an interrupted run keeps what it has.

    Args:
        limit: seconds for all jobs, in equal parts; what one leaves, the next ones share.
        budget: of each search, besides the time.
        resume: leave out jobs that `out` has an entry for, of these versions and kernels, and those that an earlier run did not survive.

    Raises:
        ContextLost: a plan broke the CUDA context. What was written before stays; a run with `resume` goes on after this job.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
    gpu = gpu_of(device)
    if gpu is None:
        raise ValueError(
            f"device: plans are timed on a CUDA device, not on {device}; --dry-run shows what would be tried"
        )
    mend(gpu, out)
    about = _about(device, strategy, seed)
    earlier = Earlier(gpu, out, resume)
    left_out = {
        i: MEASURED if earlier.measured(j) else FATAL
        for i, j in enumerate(jobs)
        if earlier.measured(j) or earlier.fatal(j)
    }
    todo = len(jobs) - len(left_out)
    budget = budget or Budget()
    end = None if limit is None else clock() + limit
    for i, job in enumerate(jobs):
        if i in left_out:
            yield Result(job, None, None, None, left_out[i])
            continue
        now = clock()
        if end is not None and now >= end:
            yield Result(job, None, None, None, "no time left")
            continue
        its = budget if end is None else _part(budget, (end - now) / todo)
        todo -= 1
        found = candidates(job, model)
        with earlier.under_way(job):
            outcome, reason = _search(job, found, device, bench, its, strategy, seed, clock)
            data = None if outcome is None or outcome.best is None else entry(job, outcome, found.counts(), about)
            if data is not None:
                save(gpu, [data], out)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield Result(job, found, outcome, data, reason)


def _part(budget: Budget, seconds: float) -> Budget:
    """The budget of a job that has so many seconds: a batch under way is finished, so it must not take longer."""
    batch = max(1, min(budget.batch, int(budget.batch * seconds / LEAST_SECONDS)))
    return replace(budget, seconds=seconds, batch=batch)


def _search(
    job: Job, found: Candidates, device: torch.device, bench: Callable[[Job, torch.device], Bench], budget: Budget, strategy: str,
    seed: int, clock: Callable[[], float],
) -> tuple[Outcome[Any] | None, str | None]:  # fmt: skip
    """(what came of it, or None and why nothing did)."""
    try:
        timer = watched(bench)(job, device)
        with torch.inference_mode():
            return search(
                found.plans, watched(timer.measure), watched(timer.verify), default=job.builtin, strategy=strategy, seed=seed,
                budget=budget, prepare=watched(timer.prepare), clock=clock,
            ), None  # fmt: skip
    except torch.OutOfMemoryError:
        return None, "its inputs do not fit in the device's memory"
    except TuningError as e:
        if not _alive(device):
            raise ContextLost(f"{e}; what was written before stays, and --resume goes on after this job") from e
        return None, str(e)


def _alive(device: torch.device) -> bool:
    """Whether the device still computes: after an illegal memory access no call of this process succeeds."""
    try:
        return torch.ones(8, device=device).sum().item() == 8
    except RuntimeError:
        return False


def _about(device: torch.device, strategy: str, seed: int) -> Mapping[str, Any]:
    found = provenance(Path(__file__).resolve().parents[2])
    return {
        "device": torch.cuda.get_device_name(device), "date": found.date, "commit": found.commit, "dirty": found.dirty,
        "search": strategy, "seed": seed,
    }  # fmt: skip
