"""Fills the masks of many constraints: in threads where that is worth it, and beside the thread that asks."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from nanovllm.structured.constraint import SLOW_MASK_SECONDS, TokenConstraint

_PARALLEL_MASKS = 8
"""Masks from which on threads fill them: one in a hundred takes milliseconds, and the device waits if these add up."""
THREADS = min(16, 2 * (os.cpu_count() or 1))
"""Threads that fill masks. llguidance halves the masks until there are twice as many parts as threads, and a part is
one thread's: with few threads a mask waits behind a slow one, although a core is idle."""
_STEPS_TIMED = 64
_SLOW_STEPS_SECONDS = 0.5
"""The seconds that slow steps among the latest `_STEPS_TIMED` take together, from which on each mask is timed."""


class Filling:
    """Masks that are being filled."""

    def __init__(self, seconds: float | None, running: Future[float] | None = None) -> None:
        self._seconds = seconds
        self._running = running

    def wait(self) -> float:
        """Return when the masks are there: the seconds that filling them took."""
        if self._seconds is None:
            assert self._running is not None
            self._seconds = self._running.result()
        return self._seconds

    def settle(self) -> None:
        """Return when nothing writes to the masks any more, filled or not."""
        if self._running is not None and not self._running.done():
            wait([self._running])


class MaskFiller:
    """Fills the masks of many constraints, in several threads where that is worth it.

    Args:
        slow_seconds: a step whose masks take longer is slow.
        slow_steps_seconds: when slow steps take more than this together, masks are timed one by one for some steps.
            A sequence whose masks are slow is ended then. These steps take longer, since threads of Python wait for
            the interpreter after each mask; so few slow masks, which any grammar may have, do not lead there.
    """

    def __init__(
        self, slow_seconds: float = SLOW_MASK_SECONDS, slow_steps_seconds: float = _SLOW_STEPS_SECONDS
    ) -> None:
        self._slow_seconds = slow_seconds
        self._slow_steps_seconds = slow_steps_seconds
        self._slow_steps: deque[float] = deque(maxlen=_STEPS_TIMED)
        """Seconds of the latest steps that were filled in threads; 0 for those that were not slow."""
        self._executor: Any = None
        """llguidance's threads, which say nothing of the time of a single mask."""
        self._timed_executor: ThreadPoolExecutor | None = None
        self._beside: ThreadPoolExecutor | None = None
        self._steps_timed = 0
        """Steps that are left in which each mask is timed."""

    def filled(
        self, constraints: Sequence[TokenConstraint], masks: np.ndarray, first: Callable[[], object] | None = None
    ) -> Filling:
        """`fill`, after calling `first`."""
        if first is not None:
            first()
        start = time.perf_counter()
        self.fill(constraints, masks)
        return Filling(time.perf_counter() - start)

    def start(
        self, constraints: Sequence[TokenConstraint], masks: np.ndarray, first: Callable[[], object] | None = None
    ) -> Filling:
        """As `filled`, in a thread. The caller goes on when `first` has returned or failed, and does not touch the
        constraints until `Filling.wait`, which raises what failed.

        The thread wakes up while `first` waits for something, and not afterwards.
        """
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, "masks")
        started = threading.Lock()
        started.acquire()

        def run() -> float:
            try:
                if first is not None:
                    first()
            finally:
                started.release()
            start = time.perf_counter()
            # One call, in which the interpreter is free: this thread would have to wait for it after each mask.
            self.fill(constraints, masks, parallel_from=1)
            return time.perf_counter() - start

        try:
            running = self._beside.submit(run)
        except RuntimeError:  # the interpreter ends: no thread takes work any more
            return self.filled(constraints, masks, first)
        # Waiting hands over the interpreter: else this thread would keep it for up to 5 ms. The masks need it no more.
        started.acquire()
        return Filling(None, running)

    def fill(
        self, constraints: Sequence[TokenConstraint], masks: np.ndarray, parallel_from: int = _PARALLEL_MASKS
    ) -> None:
        """Write the grammar's mask of each constraint to its row of masks [n, num_words] int32.

        parallel_from: so many grammars or more are filled in threads.
        """
        working = [i for i, c in enumerate(constraints) if c.matcher is not None and not c.broken]
        working.sort(
            key=lambda i: constraints[i].group
        )  # a thread takes neighbours: those of a group would wait for it
        matchers = [(constraints[i].matcher, i) for i in working]
        if len(matchers) < parallel_from or not matchers:
            _fill(constraints, masks)
            return
        if self._steps_timed:
            self._steps_timed -= 1
            self._fill_timed(constraints, masks)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(THREADS)
        masks[:] = -1
        start = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks[0].nbytes, len(masks))
        seconds = time.perf_counter() - start
        self._slow_steps.append(seconds if seconds > self._slow_seconds else 0.0)
        if sum(self._slow_steps) > self._slow_steps_seconds:
            self._steps_timed = _STEPS_TIMED
            self._slow_steps.clear()

    def _fill_timed(self, constraints: Sequence[TokenConstraint], masks: np.ndarray) -> None:
        if self._timed_executor is None:
            self._timed_executor = ThreadPoolExecutor(THREADS, "mask")
        starts = range(THREADS)
        list(self._timed_executor.map(lambda i: _fill(constraints[i::THREADS], masks[i::THREADS]), starts))


def _fill(constraints: Sequence[TokenConstraint], masks: np.ndarray) -> None:
    for constraint, mask in zip(constraints, masks):
        constraint.fill(mask)
