"""Runs an engine's steps for threads that wait for requests: one thread at a time does, for all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.request import Request

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
T = TypeVar("T")


class Waiter:
    """Requests that one thread waits for. It is their listener, called by the thread that runs the steps.

    Attributes:
        unfinished: requests of which something is still to come.
        lost: a request that a failed step ended.
        news: set when the waiting thread has a reason to look.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = list(requests)
        self.unfinished = set(self._requests)
        self.lost: Request | None = None
        self._text = ""
        self._taken = 0
        self.news = threading.Event()
        self.thread: int | None = None
        for request in self._requests:
            request.listener = self._listen

    @property
    def over(self) -> bool:
        """Whether all requests have ended, or one of them was lost."""
        return not self.unfinished or self.lost is not None

    @property
    def has_text(self) -> bool:
        """Whether `take_text` has something."""
        return len(self._text) > self._taken

    def take_text(self) -> str:
        """The new text of an incremental request, without what a stop string may still take back."""
        text = self._text[self._taken :]
        self._taken += len(text)
        return text

    def raise_if_lost(self) -> None:
        if self.lost is not None:
            raise RuntimeError(
                "the output is incomplete: a step that computed this request with others failed"
            ) from self.lost.failure

    def close(self) -> None:
        """Forget the requests and the failure: its traceback holds this thread's frames, and these hold the engine."""
        for request in self._requests:
            request.listener = request.failure = None
        self.lost = None

    def _listen(self, request: Request) -> None:
        if request.incremental:  # a text is published before its end is: the waiting thread looks in the other order
            self._text = request.completions[0].settled_text
        if request.failure is not None:
            self.lost = request
        elif request.finished:
            self.unfinished.discard(request)
        if request.incremental or self.over:
            self.news.set()


class StepLoop:
    """Shares an engine's steps among threads.

    The threads that wait stand in a queue. The first of them runs steps, for the requests of all, until its own have
    ended; then the next one does. So a lone thread runs its steps without handing anything over, and a thread whose
    requests end while another runs the steps goes on at once. The queue is a deque, since appending to one and removing
    from it are atomic: there is no lock that an interrupt could leave locked.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._waiting: deque[Waiter] = deque()

    def wait(self, waiter: Waiter, until: Callable[[], bool], tick: Callable[[], None] | None = None) -> None:
        """Return when `until()`, which depends on the waiter alone.

        Args:
            tick: called after every step, or ten times a second.

        Raises:
            RuntimeError: the same thread waits already, for example since a signal handler called `generate`.
            Whatever a step raised that this thread ran, if requests of the waiter were lost by it.
        """
        self._name_thread(waiter)
        try:
            try:
                self._waiting.append(waiter)
                while not until():
                    if self._waiting[0] is waiter:
                        self._step(waiter)
                    else:
                        waiter.news.wait(None if tick is None else _TICK_SECONDS)
                        waiter.news.clear()
                    if tick is not None:
                        tick()
            finally:
                self._leave(waiter)
        finally:  # again, since an interrupt may have come at the first time
            self._leave(waiter)

    def serve(self, waiter: Waiter, until: Callable[[], bool], stepped: Callable[[list[Request], float], None]) -> None:
        """Run steps in this thread whenever the engine has something to do, until `until()`.

        Args:
            waiter: one without requests. Set its `news` after a request was queued or aborted, and for `until`.
            stepped: called after every step with the requests that got tokens and the seconds since the step before, or
                since there was work. If the step failed there are none, and the requests that it lost have told their
                listeners.
        """
        self._name_thread(waiter)
        try:
            self._waiting.append(waiter)
            since = time.perf_counter()
            while not until():
                if self._waiting[0] is not waiter or not self._engine.has_unfinished:
                    waiter.news.wait()
                    waiter.news.clear()
                    since = time.perf_counter()
                    continue
                grown: list[Request] = []
                try:
                    grown = self._engine.step()
                except Exception:
                    logger.warning("a step failed; the requests that it computed are lost", exc_info=True)
                before, since = since, time.perf_counter()
                stepped(grown, since - before)
        finally:
            self._leave(waiter)

    def end(self, waiter: Waiter, requests: Iterable[Request]) -> None:
        """Abort the requests of a waiter that have not ended."""
        for request in requests:
            self._engine.abort(request)
        waiter.close()

    def between_steps(self, action: Callable[[], T]) -> T:
        """Call `action` when no other thread runs steps, nor will until it has returned.

        Raises:
            RuntimeError: as `wait`.
        """
        waiter = Waiter(())
        self._name_thread(waiter)
        try:
            try:
                self._waiting.append(waiter)
                while self._waiting[0] is not waiter:
                    waiter.news.wait()
                    waiter.news.clear()
                return action()
            finally:
                self._leave(waiter)
        finally:  # again, since an interrupt may have come at the first time
            self._leave(waiter)

    def _name_thread(self, waiter: Waiter) -> None:
        thread = threading.get_ident()
        if any(other.thread == thread for other in self._waiting.copy()):
            raise RuntimeError(
                "this thread is already in generate or in a stream of the same engine; a signal handler or a finalizer"
                " must not start requests"
            )
        waiter.thread = thread

    def _step(self, waiter: Waiter) -> None:
        num_lost = self._engine.num_lost
        try:
            self._engine.step()
        except Exception:
            if waiter.lost is not None or self._engine.num_lost == num_lost:
                raise
            # Only requests of other threads were lost, and these threads are told so.
            logger.warning("a step failed; the requests that it computed are lost", exc_info=True)

    def _leave(self, waiter: Waiter) -> None:
        try:
            self._waiting.remove(waiter)
        except ValueError:
            pass
        try:
            self._waiting[0].news.set()
        except IndexError:
            pass
