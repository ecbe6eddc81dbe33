"""What an earlier run left in a directory: entries that need not be measured again, and the jobs that it did not survive."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.kernels.versions import versions
from nanovllm.perf.autotune.store import readable
from nanovllm.perf.autotune.targets import Job

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

    A job that is under way is noted in a file beside the configurations. It stays there if the process ends in it: then a kernel
    hung or broke the CUDA context, and a run that goes on leaves it out.

    Args:
        resume: whether this run goes on; else there is nothing earlier.
    """

    def __init__(self, gpu: str, directory: Path, resume: bool) -> None:
        self._path = directory / f"{gpu}.under-way"
        configurations = directory / f"{gpu}.json"
        self._entries: set[str] = set()
        self._fatal: list[str] = []
        if not resume:
            self._path.unlink(missing_ok=True)
            return
        self._entries = {
            _identity(e["tunable"], e["source"], e["versions"], e["key"]) for e in readable(configurations)[0]
        }
        if self._path.exists():
            self._fatal = self._path.read_text().splitlines()

    def measured(self, job: Job) -> bool:
        return identity(job) in self._entries

    def fatal(self, job: Job) -> bool:
        return identity(job) in self._fatal

    @contextmanager
    def under_way(self, job: Job) -> Iterator[None]:
        """Within the block the job is noted; after a `ContextLost` it stays so."""
        self._note([*self._fatal, identity(job)])
        try:
            yield
        except ContextLost:
            raise
        except BaseException:
            self._note(self._fatal)
            raise
        self._note(self._fatal)

    def _note(self, jobs: list[str]) -> None:
        if not jobs:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{job}\n" for job in jobs))


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
