"""Fills the masks of many constraints: in threads where that is worth it, or in one thread while the caller goes on."""

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


_NOBODY = object()
"""Owns a filling that was given up before a thread began with it."""


class Filling:
    """Masks that are to be filled, once: `run` does it, in any thread. Another thread waits for it.

    These waits may be interrupted at any line: what has happened is in plain attributes, and the locks only wake up.

    Args:
        before: called first.
        fill: fills them.
        end: called at the end, whatever happened, with whether something failed.
    """

    def __init__(
        self,
        before: Callable[[], object],
        fill: Callable[[], object],
        end: Callable[[bool], object] | None = None,
    ) -> None:
        self._calls: Any = before, fill
        self._end = end
        self._owner: dict[str, object] = {}
        """The call of `run` that does it, or `_NOBODY`. `setdefault` is atomic."""
        self._failure: BaseException | None = None
        self._failed_before = False
        self._has_begun = self._has_ended = False
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._ended.acquire()

    def run(self) -> None:
        """Do all of it. It raises nothing. Nothing is done if it was done before, or given up."""
        me = object()
        if self._owner.setdefault("is", me) is not me:
            return
        before, fill = self._calls
        try:
            self._run(before, fill)
        except BaseException as failure:
            self._failure = failure
        finally:
            try:
                self._call_end()
            except BaseException as failure:
                self._failure = self._failure or failure
            finally:
                self._has_ended = True
                self._ended.release()

    def _run(self, before: Callable[[], object], fill: Callable[[], object]) -> None:
        try:
            self._failed_before = True
            before()
            self._failed_before = False
        finally:
            # What waits for this needs longer to wake up than `fill` to begin with what needs no interpreter.
            self._has_begun = True
            self._begun.release()
        fill()

    def _call_end(self) -> None:
        end, failed = self._end, self._failure is not None
        self._calls = None  # they refer to their caller, who may keep this
        if end is not None:
            end(failed)
        self._end = None

    def wait_until_filling(self) -> None:
        """Return when `before` has returned and filling begins. It raises what `before` raised."""
        if not self._has_begun:
            self._begun.acquire()
            self._begun.release()
        if self._failed_before:
            self.wait_until_filled()

    def cancel_or_wait(self) -> None:
        """Return when nothing writes to the masks any more, filled or not. If no thread has begun yet, none will."""
        if self._owner.setdefault("is", _NOBODY) is _NOBODY:
            if not self._has_ended:
                self._failure = RuntimeError("these masks were given up")
                self._failed_before = True
                self._call_end()
                self._has_begun = self._has_ended = True
        elif not self._has_ended:
            self._ended.acquire()
            self._ended.release()

    def wait_until_filled(self) -> None:
        """Return when the masks are there. It raises what filling them raised."""
        if not self._has_ended:
            self._ended.acquire()
            self._ended.release()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what filling the masks has raised."""
        if self._failure is not None:
            raise self._failure


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
        self._thread: ThreadPoolExecutor | None = None
        self._steps_timed = 0
        """Steps that are left in which each mask is timed."""

    def prepare(
        self,
        constraints: Sequence[TokenConstraint],
        masks: np.ndarray,
        in_thread: bool,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        end: Callable[[bool], object] | None = None,
    ) -> Filling:
        """A `Filling` of these masks, to be run. before, after: called before and after they are filled.

        in_thread: it will run in a thread. It may first move the grammars on, in `before`. So all that it takes of the
            interpreter until it fills masks comes now: then, the caller could have the interpreter.
        """
        work = self._matchers(constraints)
        changing = [k for k, (_, i) in enumerate(work) if constraints[i].has_fillers]
        masks[:] = -1

        def begin() -> None:
            if before is not None:
                before()
            for k in changing:
                i = work[k][1]
                work[k] = constraints[i].filler, i

        # In a thread even one grammar is filled in one call without the interpreter: Python would wait for it.
        parallel_from = 1 if in_thread else _PARALLEL_MASKS

        def fill() -> None:
            self._fill_these(work, constraints, masks, parallel_from)
            if after is not None:
                after()

        return Filling(begin, fill, end)

    def submit(self, filling: Filling) -> bool:
        """Run it in the thread, which does one after the other in order; False: there is no thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        try:
            self._thread.submit(filling.run)
        except BaseException as error:
            # The interpreter ends, or no thread can be started: the executor then has queued the work all the same. Or
            # an interrupt came, and the executor may not know the thread that it has started.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
            if isinstance(error, RuntimeError):
                return False
            raise
        return True

    def fill(self, constraints: Sequence[TokenConstraint], masks: np.ndarray) -> None:
        """Write the grammar's mask of each constraint to its row of masks [n, num_words] int32."""
        filling = self.prepare(constraints, masks, False)
        filling.run()
        filling.wait_until_filled()

    def _matchers(self, constraints: Sequence[TokenConstraint]) -> list[tuple[Any, int]]:
        """(matcher, index of its mask) of those with a grammar. One that is broken allows end tokens."""
        working = [i for i, c in enumerate(constraints) if c.matcher is not None]
        # A thread takes neighbours: those of a group would wait for it.
        working.sort(key=lambda i: constraints[i].group)
        return [(constraints[i].filler, i) for i in working]

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
