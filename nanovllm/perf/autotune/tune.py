"""From a list of jobs to entries of a file: the time is shared out, each job searched, each result written when it is there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.configs import gpu_of
from nanovllm.perf.autotune.measure import Bench
from nanovllm.perf.autotune.pruning import Candidates, candidates
from nanovllm.perf.autotune.search import Budget, Outcome, search
from nanovllm.perf.autotune.store import entry, save
from nanovllm.perf.autotune.targets import Job
from nanovllm.perf.results import new_record

if TYPE_CHECKING:
    from nanovllm.perf.presets import DeviceModel


LEAST_SECONDS = 3.0
"""About what the first batch of plans takes, mostly to compile."""


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
    bench: Callable[[Job, torch.device], Bench] = Bench,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Search each job and write what was found, job by job, so that an interrupted run keeps what it has.

    Args:
        limit: seconds for all jobs; what one leaves, the next ones share. A job gets `LEAST_SECONDS` or nothing: the first
            jobs then have enough for a result, and the last ones none.
        budget: of each search, besides the time.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
    gpu = gpu_of(device)
    if gpu is None:
        raise ValueError(
            f"device: plans are timed on a CUDA device, not on {device}; --dry-run shows what would be tried"
        )
    about = _about(device, strategy, seed)
    end = None if limit is None else clock() + limit
    for i, job in enumerate(jobs):
        now = clock()
        left = None if end is None else max((end - now) / (len(jobs) - i), LEAST_SECONDS)
        if end is not None and now >= end:
            yield Result(job, None, None, None, "no time left")
            continue
        found = candidates(job, model)
        try:
            timer = bench(job, device)
        except torch.OutOfMemoryError:
            yield Result(job, found, None, None, "its inputs do not fit in the device's memory")
            continue
        with torch.inference_mode():
            outcome = search(
                found.plans, timer.measure, timer.verify, default=job.builtin, strategy=strategy, seed=seed,
                budget=replace(budget or Budget(), seconds=left), prepare=timer.prepare, clock=clock,
            )  # fmt: skip
        data = None if outcome.best is None else entry(job, outcome, found.counts(), about)
        if data is not None:
            save(gpu, [data], out)
        del timer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield Result(job, found, outcome, data)


def _about(device: torch.device, strategy: str, seed: int) -> Mapping[str, Any]:
    record = new_record(Path(__file__).resolve().parents[3], {})
    return {
        "device": torch.cuda.get_device_name(device), "date": record.date, "commit": record.commit, "dirty": record.dirty,
        "search": strategy, "seed": seed,
    }  # fmt: skip
