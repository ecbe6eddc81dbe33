"""What an earlier run left in a directory: entries that need not be measured again, and the jobs that it did not survive."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TextIO, TypeVar
from uuid import uuid4

from nanovllm.hardware.versions import versions
from nanovllm.tune.store import readable
from nanovllm.tune.targets import Job

F = TypeVar("F", bound=Callable[..., Any])

HANG_SECONDS = 300.0
"""More than compiling, timing or checking a batch of plans ever takes: then one of them hangs."""


class ContextLost(RuntimeError):
    """A kernel broke the CUDA context: this process measures nothing any more."""


def _identity(tunable: str, source: str, of: Mapping[str, str], key: Mapping[str, Any]) -> str:
    return json.dumps([tunable, source, of, key], sort_keys=True)


def identity(job: Job) -> str:
    """What makes an entry one of this job: the tunable with its kernels' source, the versions here, and the key."""
    return _identity(job.tunable.name, job.tunable.source, versions(), job.tunable.key_to_json(job.key))


class Earlier:
    """What earlier runs left for a GPU.

    A job that is under way is noted beside the configurations, in a file of its own, which this process holds a lock on; the
    lock goes with the process. A note that nobody holds is of a run that ended in its job: then a kernel hung or broke the CUDA
    context, and a run that goes on leaves that job out. The notes of runs at the same time are left to them.

    Args:
        resume: whether this run goes on; else there is nothing earlier.
    """

    def __init__(self, gpu: str, directory: Path, resume: bool) -> None:
        self._gpu, self._directory = gpu, directory
        self._entries: set[str] = set()
        self._fatal: set[str] = set()
        for path, job in _left(gpu, directory):
            if resume:
                self._fatal.add(job)
            else:
                path.unlink(missing_ok=True)
        if resume:
            self._entries = {
                _identity(e["tunable"], e["source"], e["versions"], e["key"])
                for e in readable(directory / f"{gpu}.json")[0]
            }

    def measured(self, job: Job) -> bool:
        return identity(job) in self._entries

    def fatal(self, job: Job) -> bool:
        return identity(job) in self._fatal

    @contextmanager
    def under_way(self, job: Job) -> Iterator[None]:
        """Within the block the job is noted; after a `ContextLost` it stays so."""
        import fcntl

        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._gpu}.{uuid4().hex}.under-way"
        with open(path, "x") as note:
            try:
                # Empty until it is locked, and before it is not: nobody acts on an empty note.
                fcntl.flock(note, fcntl.LOCK_EX)
                note.write(identity(job))
                note.flush()
                yield
            except ContextLost:
                raise
            except BaseException:
                _drop(path, note)
                raise
            _drop(path, note)


def _drop(path: Path, note: TextIO) -> None:
    note.truncate(0)
    path.unlink(missing_ok=True)


def _left(gpu: str, directory: Path) -> Iterator[tuple[Path, str]]:
    """(file, job) of the notes that no process holds. The lock that shows it is a shared one: another run may look, too."""
    import fcntl

    for path in sorted(directory.glob(f"{gpu}.*.under-way")):
        try:
            with open(path) as note:
                fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
                job = note.read()
        except (BlockingIOError, FileNotFoundError):
            continue  # its job is under way, or has ended just now
        if job:
            yield path, job


def watched(fn: F, seconds: float = HANG_SECONDS) -> F:
    """A call of `fn` that takes longer ends the process, with a traceback: Python cannot take a kernel that hangs from the GPU."""

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        try:
            return fn(*args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return run  # type: ignore[return-value]
