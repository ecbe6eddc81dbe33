"""From a list of jobs to entries of a file: share the time, search each job, write each result when it is there."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nanovllm.hardware.versions import provenance, versions
from nanovllm.tune.jobs import TuningJob
from nanovllm.tune.measure import JobTimer, TuningError
from nanovllm.tune.search import Budget, Outcome, search
from nanovllm.tune.spaces import candidates
from nanovllm.tune.store import entry, readable, save

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

R = TypeVar("R")
LEAST_SECONDS = 3.0
"""About what the first batch of plans takes, mostly to compile. A job that has less compiles fewer together."""
HANG_SECONDS = 300.0
"""More than compiling, timing or checking a batch of plans ever takes: a kernel hangs that takes longer."""
MEASURED = "measured before, with these versions and kernels"
FATAL = "an earlier run ended while it was measured; without --resume it is tried again"


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context: this process can measure nothing any more."""


@dataclass(frozen=True)
class Result:
    """What came of one job. `entry` is None if no right plan was found; `reason` says why nothing was tried."""

    job: TuningJob
    outcome: Outcome | None
    entry: dict[str, Any] | None
    reason: str | None = None


def tune(
    jobs: Sequence[TuningJob], device: torch.device, model: DeviceModel, gpu: str, out: Path, *,
    budget: Budget | None = None, resume: bool = False, timer: Callable[[TuningJob, torch.device], Any] = JobTimer,
    hang_seconds: float = HANG_SECONDS, clock: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:  # fmt: skip
    """Search each job and write its result at once, so that an interrupted run keeps what it has.

    Args:
        gpu: the name of the device's file in `out`.
        budget: its seconds are for all jobs, in equal parts; the time that a job leaves goes to the next ones.
        resume: leave out jobs that `out` has an entry for, of these versions and kernels, and jobs that an earlier run
            did not survive: it left a note.
        timer: makes what measures, verifies and prepares the plans of a job.
        hang_seconds: a call of the timer that takes longer ends the process with a traceback.

    Raises:
        ContextLost: a plan broke the CUDA context. What was written stays; a run with `resume` goes on after this job.
    """
    out.mkdir(parents=True, exist_ok=True)
    if readable(out / f"{gpu}.json")[1] is not None:
        save(gpu, [], out)  # sets the file aside before anything is measured
    done = _done(gpu, out, resume)
    left_out = [done.get(_identity(job)) for job in jobs]
    todo, budget, start = left_out.count(None), budget or Budget(), clock()
    for job, reason in zip(jobs, left_out):
        left = None if budget.seconds is None else start + budget.seconds - clock()
        if reason is None and left is not None and left <= 0:
            reason = "no time left"
        if reason is not None:
            yield Result(job, None, None, reason)
            continue
        found, data = candidates(job.tunable, job.key, job.builtin, model), None
        part = budget if left is None else _part(budget, left / todo)
        todo -= 1
        with _under_way(job, gpu, out):
            outcome, reason = _search(job, found.plans, part, _Watched(timer, hang_seconds), device, clock)
            if outcome is not None and outcome.ranking:
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


@dataclass(frozen=True)
class _Watched:
    """Calls a function. A call that takes too long ends the process: Python cannot stop a kernel that hangs."""

    fn: Callable[..., Any]
    seconds: float

    def __call__(self, *args: Any) -> Any:
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=2)
        try:
            return self.fn(*args)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _search(
    job: TuningJob,
    plans: Sequence[Any],
    budget: Budget,
    timer: _Watched,
    device: torch.device,
    clock: Callable[[], float],
) -> tuple[Outcome | None, str | None]:
    """(what the search found, or None and why there is nothing)."""
    made = None
    try:
        made = timer(job, device)
        measure, verify, prepare = (replace(timer, fn=fn) for fn in (made.measure, made.verify, made.prepare))
        with torch.inference_mode():
            found = search(plans, measure, verify, default=job.builtin, budget=budget, prepare=prepare, clock=clock)
            return found, None
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


def _identity(job: TuningJob) -> str:
    """What makes an entry one of this job: the tunable with its kernels' source, the versions here, and the key."""
    return json.dumps(
        [job.tunable.name, job.tunable.source, versions(), job.tunable.key_to_json(job.key)], sort_keys=True
    )


def _done(gpu: str, out: Path, resume: bool) -> dict[str, str]:
    """Identity of a job -> why a resumed run leaves it out. A run that begins anew removes the notes of dead runs."""
    found = {}
    if resume:
        for e in readable(out / f"{gpu}.json")[0]:
            found[json.dumps([e["tunable"], e["source"], e["versions"], e["key"]], sort_keys=True)] = MEASURED
    for note in out.glob(f"{gpu}.*.under-way"):
        if _runs(int(note.name.split(".")[-2])):
            continue
        if resume:
            found.setdefault(note.read_text(), FATAL)
        else:
            note.unlink(missing_ok=True)
    return found


def _runs(pid: int) -> bool:
    """Whether another process of this number runs."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return pid != os.getpid()


@contextmanager
def _under_way(job: TuningJob, gpu: str, out: Path) -> Iterator[None]:
    """Within the block a note names the job and this process. It stays if the block or the process does not survive."""
    identity = _identity(job)
    name = f"{gpu}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}.{os.getpid()}.under-way"
    (out / name).write_text(identity)
    try:
        yield
    except ContextLost:
        raise
    except BaseException:  # such as Ctrl-C: the device is well
        (out / name).unlink(missing_ok=True)
        raise
    (out / name).unlink(missing_ok=True)
