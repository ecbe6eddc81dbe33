"""Rank 0, which starts the processes of the other ranks."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.endings import abort, end_groups, leave
from nanovllm.distributed.group import Group, split_over
from nanovllm.distributed.processes import Processes, RankError
from nanovllm.distributed.rendezvous import join
from nanovllm.engine.ranks.interface import (
    CHECK_VARIABLE,
    AbortRecord,
    Ranks,
    RequestRecord,
    ScheduleDigest,
    T,
    still_seconds,
)
from nanovllm.engine.ranks.interrupts import interrupts_deferred
from nanovllm.engine.requests.request import InboxEntry
from nanovllm.engine.step import ScheduledStep
from nanovllm.kernels import resolve_kernels
from nanovllm.log_format import logs_json
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_registry import model_class
from nanovllm.wording import counted

logger = logging.getLogger(__name__)

_STUCK_SECONDS = 20.0
_LEAST_STUCK_SECONDS = 5.0  # to end the ranks takes up to a second, whatever rank_timeout is
_NOT_STARTED = "it has not started; pass a larger rank_timeout if the machine is slow"
_GLOO_TIMEOUT = "Timed out"
"""In the message of the RuntimeError that Gloo raises when a collective took longer than `rank_timeout`."""
_POSSIBLE_SIZES = range(1, 65)


class Leader(Ranks):
    """Rank 0: starts the processes of the other ranks. They end with this object.

    Raises:
        ValueError: the model cannot be split over this number of ranks.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
        check_split(model, config.tensor_parallel_size, device)
        self._config, self._device, self._size = config, device, config.tensor_parallel_size
        self._groups: list[Group] = []
        self._when_failed: list[Callable[[], None]] = []
        self._digest = ScheduleDigest() if os.environ.get(CHECK_VARIABLE) == "1" else None
        self._directory = tempfile.mkdtemp(prefix="nanovllm-ranks-")  # mode 0700
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        environment = {}
        if device.type == "cpu":
            threads = torch.get_num_threads()
            weakref.finalize(self, torch.set_num_threads, threads)
            torch.set_num_threads(max(1, threads // self._size))
            environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        groups, calls = self._groups, self._when_failed  # not self, which the processes are to end with

        def on_failure() -> None:
            for call in calls:
                call()
            abort(groups)

        # A CPU's collectives end by themselves after that time.
        stuck = max(_LEAST_STUCK_SECONDS, min(_STUCK_SECONDS, config.rank_timeout / 3))
        stuck += config.rank_timeout if device.type == "cpu" else 0
        self._processes = Processes(
            "nanovllm.engine.ranks.worker", self._size, environment, on_failure, stuck, still_seconds(config, device)
        )
        self._processes.send((config, self._directory, logger.getEffectiveLevel(), logs_json()))
        weakref.finalize(self, leave, self._processes, groups)

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self._processes.failure

    def when_failed(self, call: Callable[[], None]) -> None:
        self._when_failed.append(call)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks from 1 on."""
        return self._processes.pids

    def make_on_all(self, make: Callable[[], T]) -> T:
        with self._stopped_on_failure():
            timeout = self._config.rank_timeout
            self._processes.receive("started", timeout, _NOT_STARTED)
            barrier = _Barrier(self._processes, timeout)
            self._processes.watch(True)
            group = join(Path(self._directory), 0, self._size, self._device, timeout, barrier)
            self._groups.append(group)
            self._processes.watch(False)  # until the ranks meet: a disk may be slow
            with split_over(group):
                made = make()
            barrier("the engine has started")
            return made

    def run_step(self, step: Callable[[], T]) -> T:
        try:
            self._processes.raise_failure()
        except RankError as e:
            self.close()  # the rank may have failed between two steps
            raise RankError(f"{e}; the engine has stopped, make a new one") from None
        with interrupts_deferred(), self._stopped_on_failure():
            self._processes.watch(True)
            return step()

    @contextmanager
    def _stopped_on_failure(self) -> Iterator[None]:
        """A failure within ends all ranks: they are no longer at the same step."""
        self._processes.expect_return(True)
        try:
            yield
        except BaseException as error:
            failure = self._failure_behind(error)
            self._processes.fail(f"rank 0 of {self._size} failed: {type(error).__name__}: {error}")
            self.close()
            self._wait_for_device()
            self._end_of_wait()
            if failure is not None and isinstance(error, RuntimeError):
                raise RankError(failure) from error
            raise
        self._end_of_wait()

    def _failure_behind(self, error: BaseException) -> str | None:
        """Which other rank failed or hangs, if that may be why a call of this rank raised `error`."""
        if isinstance(error, RuntimeError) and not isinstance(error, RankError):
            self._processes.wait_for_failure()  # perhaps another rank broke the connection
        if self._processes.failure is not None or _GLOO_TIMEOUT not in str(error):
            return self._processes.failure
        ranks = "rank 1" if self._size == 2 else f"one of the ranks 1 to {self._size - 1}"
        return f"{ranks} did not come to a sum over the ranks for {self._config.rank_timeout:g} s; it hangs"

    def _end_of_wait(self) -> None:
        self._processes.watch(False)
        self._processes.expect_return(False)

    def _wait_for_device(self) -> None:
        """After a failure. A program whose GPU waits for a rank that is gone would hang as soon as it uses the GPU; it
        is ended now, with a message.
        """
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError:
                logger.debug("the GPU has failed", exc_info=True)

    def send_inbox(self, entries: Sequence[InboxEntry]) -> None:
        news = [
            RequestRecord.of(request)
            if aborted is None
            else AbortRecord(request.request_id, [completion.seq.index for completion in aborted])
            for request, aborted in entries
        ]
        self._processes.send(("step", news))

    def call_on_others(self, method: str) -> None:
        self._processes.send((method, None))

    def compare_schedules(self, step: ScheduledStep | None) -> None:
        if self._digest is None:
            return
        self._digest.add(step)
        if self._digest.is_due:
            digests = self._processes.receive("digest", self._config.rank_timeout, "its schedule is to be compared")
            for rank, digest in enumerate(digests, 1):
                if digest != self._digest.value:
                    raise RankError(
                        f"rank {rank} of {self._size} has another schedule or other tokens than rank 0 after"
                        f" {counted(self._digest.steps, 'step')}; the engine has stopped"
                    )

    def close(self) -> None:
        end_groups(self._processes, self._groups)
        self._processes.close()


class _Barrier:
    """`Group.barrier` of rank 0."""

    def __init__(self, processes: Processes, timeout: float) -> None:
        self._processes, self._timeout = processes, timeout

    def __call__(self, place: str) -> None:
        others = self._processes.receive("at", self._timeout, f"it did not come to where {place}")
        for rank, other in enumerate(others, 1):
            if other != place:
                both = [text.split(", ") for text in (other, place)]
                theirs, ours = (", ".join(part for part in a if part not in b) for a, b in (both, both[::-1]))
                raise RankError(f"rank {rank} differs from rank 0: {theirs} instead of {ours}")
        self._processes.send(("go", place))
        self._processes.watch(True)


def check_split(model: ModelConfig, size: int, device: torch.device) -> None:
    """Raise a ValueError that names what does not divide by `size`, and the sizes that are possible."""

    def problem(size: int) -> str | None:
        one_layer = replace(model, num_hidden_layers=1)
        try:
            with split_over(Group(0, size)), torch.device("meta"):
                model_class(model.architecture)(one_layer, 1, kernels)
        except ValueError as e:
            return str(e)
        return None

    kernels = resolve_kernels(torch.device("cpu"), use_custom_kernels=False)
    found = problem(size)
    if found is not None:
        possible = ", ".join(str(n) for n in _POSSIBLE_SIZES if problem(n) is None)
        without_gpu = "; on a CPU use 1, whose threads use all processors" if device.type == "cpu" else ""
        raise ValueError(f"{found}; sizes that this model allows: {possible}{without_gpu}")
