"""From a list of jobs to entries of a file: share the time, search each job, write each result when it is there."""

from __future__ import annotations

import faulthandler
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch

from nanovllm.hardware.versions import provenance, versions
from nanovllm.tune.jobs import Candidates, Job, candidates
from nanovllm.tune.measure import JobTimer, TuningError
from nanovllm.tune.search import Budget, Outcome, search
from nanovllm.tune.store import entry, readable, save

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

R = TypeVar("R")
LEAST_SECONDS = 3.0
"""About what the first batch of plans takes, mostly to compile. A job that has less compiles fewer together."""
HANG_SECONDS = 300.0
"""More than compiling, timing or checking a batch of plans ever takes: then one of them hangs."""
MEASURED = "measured before, with these versions and kernels"
FATAL = "an earlier run ended while it was measured; without --resume it is tried again"


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context: this process can measure nothing any more."""


@dataclass(frozen=True)
class Result:
    """What came of one job. `entry` is None if no right plan was found; `reason` says why nothing was tried."""

    job: Job
    outcome: Outcome | None
    entry: dict[str, Any] | None
    reason: str | None = None


def tune(
    jobs: Sequence[Job],
    device: torch.device,
    model: DeviceModel,
    gpu: str,
    out: Path,
    *,
    budget: Budget | None = None,
    resume: bool = False,
    timer: Callable[[Job, torch.device], Any] = JobTimer,
    hang_seconds: float = HANG_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Search each job and write what was found, job by job, so that an interrupted run keeps what it has.

    Args:
        gpu: the name of the device's file in `out`.
        budget: its seconds are for all jobs, in equal parts; what one leaves, the next ones share.
        resume: leave out jobs that `out` has an entry for, of these versions and kernels, and jobs that an earlier run
            did not survive: it left a note.
        timer: makes what measures, verifies and prepares the plans of a job.

    Raises:
        ContextLost: a plan broke the CUDA context. What was written stays; a run with `resume` goes on after this job.
    """
    out.mkdir(parents=True, exist_ok=True)
    if readable(out / f"{gpu}.json")[1] is not None:
        save(gpu, [], out)  # sets the file aside before anything is measured
    done = _done(gpu, out, resume)
    left_out = [done.get(_identity(job)) for job in jobs]
    todo = left_out.count(None)
    budget = budget or Budget()
    end = None if budget.seconds is None else clock() + budget.seconds
    for job, reason in zip(jobs, left_out):
        now = clock()
        if reason is None and end is not None and now >= end:
            reason = "no time left"
        if reason is not None:
            yield Result(job, None, None, reason)
            continue
        part = budget if end is None else _part(budget, (end - now) / todo)
        todo -= 1
        found, data = candidates(job, model), None
        with _under_way(job, gpu, out):
            outcome, reason = _search(job, found, part, timer, device, hang_seconds, clock)
            if outcome is not None and outcome.best is not None:
                data = entry(job, outcome, found.left_out, _about(device))
                save(gpu, [data], out)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield Result(job, outcome, data, reason)


def _part(budget: Budget, seconds: float) -> Budget:
    """The budget of one job. A batch under way is finished, so a batch must not take longer than the job has."""
    batch = max(1, min(budget.batch, int(budget.batch * seconds / LEAST_SECONDS)))
    return replace(budget, seconds=seconds, batch=batch)


def _search(
    job: Job, found: Candidates, budget: Budget, timer: Any, device: torch.device, hang_seconds: float, clock: Any
) -> tuple[Outcome | None, str | None]:
    """(what came of it, or None and why)."""

    def watched(fn: Callable[..., R]) -> Callable[..., R]:
        """A call that takes longer ends the process, with a traceback: Python cannot stop a kernel that hangs."""

        def run(*args: Any) -> R:
            faulthandler.dump_traceback_later(hang_seconds, exit=True, file=2)
            try:
                return fn(*args)
            finally:
                faulthandler.cancel_dump_traceback_later()

        return run

    made = None
    try:
        made = watched(timer)(job, device)
        steps = watched(made.measure), watched(made.verify)
        with torch.inference_mode():
            prepare = watched(made.prepare)
            return search(found.plans, *steps, default=job.builtin, budget=budget, prepare=prepare, clock=clock), None
    except torch.OutOfMemoryError:
        return None, "its inputs do not fit in the device's memory"
    except TuningError as e:
        if made is not None and not made.alive():
            raise ContextLost(f"{e}; what was written before stays, and --resume goes on after this job") from e
        return None, str(e)


def _about(device: torch.device) -> dict[str, Any]:
    found = provenance(Path(__file__).resolve().parents[2])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"device": name, "date": found.date, "commit": found.commit, "dirty": found.dirty, "search": "nearest first"}


# ----------------------------------------------------------------------------------------------- what earlier runs left


def _identity(job: Job) -> str:
    """What makes an entry one of this job: the tunable with its kernels' source, the versions here, and the key."""
    return json.dumps(
        [job.tunable.name, job.tunable.source, versions(), job.tunable.key_to_json(job.key)], sort_keys=True
    )


def _done(gpu: str, out: Path, resume: bool) -> dict[str, str]:
    """Identity of a job -> why a run that goes on leaves it out. Other runs remove the notes of dead ones."""
    found = {}
    if resume:
        entries = readable(out / f"{gpu}.json")[0]
        names = "tunable", "source", "versions", "key"
        found = {json.dumps([e[name] for name in names], sort_keys=True): MEASURED for e in entries}
    for path, job in _notes(gpu, out):
        if resume:
            found.setdefault(job, FATAL)
        else:
            path.unlink(missing_ok=True)
    return found


@contextmanager
def _under_way(job: Job, gpu: str, out: Path) -> Iterator[None]:
    """Within the block a note names the job, in a file that this process holds a lock on.

    The note stays after a `ContextLost`, and if the process ends: the operating system drops the lock then. A note
    without a lock is of a job that its run did not survive.
    """
    import fcntl

    path = out / f"{gpu}.{uuid4().hex}.under-way"
    with open(path, "x") as note:
        fcntl.flock(note, fcntl.LOCK_EX)  # an empty note counts for nothing, so it is written under the lock
        note.write(_identity(job))
        note.flush()
        survived = True
        try:
            yield
        except ContextLost:
            survived = False
            raise
        finally:
            if survived:
                note.truncate(0)
                path.unlink(missing_ok=True)


def _notes(gpu: str, out: Path) -> Iterator[tuple[Path, str]]:
    """(file, job) of the notes that no process holds. The lock is shared: another run may look at the same time."""
    import fcntl

    for path in sorted(out.glob(f"{gpu}.*.under-way")):
        try:
            with open(path) as note:
                fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
                job = note.read()
        except (BlockingIOError, FileNotFoundError):
            continue  # its job is under way, or has ended just now
        if job:
            yield path, job
