"""Fills the masks of many constraints: in threads where that is worth it, and beside the thread that asks."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Masks that are being filled.

    Args:
        fill: fills them.
        first: called before that.
    """

    def __init__(self, fill: Callable[[], object], first: Callable[[], object] | None = None) -> None:
        self._fill, self._first = fill, first
        self._seconds = 0.0
        self._failure: BaseException | None = None
        self._failed_before = False
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._ended.acquire()

    def run(self) -> None:
        """Call `first` and fill the masks."""
        try:
            self._call_first()
            start = time.perf_counter()
            self._fill()
            self._seconds = time.perf_counter() - start
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended.release()

    def _call_first(self) -> None:
        try:
            if self._first is not None:
                self._failed_before = True
                self._first()
                self._failed_before = False
        finally:
            # What waits for this needs longer to wake up than `_fill` to begin with what needs no interpreter.
            self._begun.release()

    def wait_begun(self) -> None:
        """Return when `first` has returned and filling begins. Once. It raises what `first` raised."""
        self._begun.acquire()
        if self._failed_before:
            self.wait()

    def settle(self) -> None:
        """Return when nothing writes to the masks any more, filled or not."""
        with self._ended:
            pass

    def wait(self) -> float:
        """Return when the masks are there: the seconds that filling them took. It raises what filling them raised."""
        self.settle()
        if self._failure is not None:
            raise self._failure
        return self._seconds


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

    def start(
        self,
        constraints: Sequence[TokenConstraint],
        masks: np.ndarray,
        beside: bool,
        first: Callable[[], object] | None = None,
    ) -> Filling:
        """`fill`, after calling `first`, which may move the grammars on. It raises what `first` raises.

        beside: both in a thread. The caller waits for `first` alone, and does not touch the constraints until
            `Filling.wait`. The thread is awake when `first` has what it waits for. All that filling takes of the
            interpreter comes before that: afterwards, the caller could have it.
        """
        work = self._matchers(constraints)
        masks[:] = -1
        # In a thread even one grammar is filled in one call without the interpreter: Python would wait for it.
        parallel_from = 1 if beside else _PARALLEL_MASKS

        def fill() -> None:
            broken = any(constraint.broken for constraint in constraints)
            self._fill_these(self._matchers(constraints) if broken else work, constraints, masks, parallel_from)

        filling = Filling(fill, first)
        if not beside or not self._submit(filling):
            filling.run()
        # Waiting hands over the interpreter: else this thread would keep it for up to 5 ms.
        try:
            filling.wait_begun()
        except BaseException:  # maybe an interrupt: the caller does not get the filling, so it could not wait for it
            filling.settle()
            raise
        return filling

    def _submit(self, filling: Filling) -> bool:
        """Run it in the thread; False: there is none."""
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, "masks")
        try:
            self._beside.submit(filling.run)
        except RuntimeError:
            # The interpreter ends, or no thread can be started. The executor then has queued the work all the same, and
            # a later call would fill these masks again.
            self._beside.shutdown(wait=False, cancel_futures=True)
            self._beside = None
            return False
        return True

    def fill(self, constraints: Sequence[TokenConstraint], masks: np.ndarray) -> None:
        """Write the grammar's mask of each constraint to its row of masks [n, num_words] int32."""
        self.start(constraints, masks, False).wait()

    def _matchers(self, constraints: Sequence[TokenConstraint]) -> list[tuple[Any, int]]:
        """(matcher, index of its mask) of those that work."""
        working = [i for i, c in enumerate(constraints) if c.matcher is not None and not c.broken]
        # A thread takes neighbours: those of a group would wait for it.
        working.sort(key=lambda i: constraints[i].group)
        return [(constraints[i].matcher, i) for i in working]

    def _fill_these(
        self, work: list[tuple[Any, int]], constraints: Sequence[TokenConstraint], masks: np.ndarray, parallel_from: int
    ) -> None:
        """work: from `_matchers`. The bits of the masks are 1."""
        if len(work) < parallel_from or not work:
            _fill(constraints, masks)
            return
        if self._steps_timed:
            self._steps_timed -= 1
            self._fill_timed(constraints, masks)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(THREADS)
        start = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(work, masks.ctypes.data, masks[0].nbytes, len(masks))
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
