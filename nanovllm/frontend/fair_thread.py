"""A thread whose time clients share."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class FairThread:
    """Runs calls in a thread, one at a time. Clients with calls that wait take turns, each with its oldest call.

    A client with many calls delays a call of another client by one of its calls, or two if the first one runs already.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]] = OrderedDict()
        """In the order of their turns. One call of the pool stands for each."""

    def submit(self, client: str, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a call for a client when its turn comes. Called from any thread.

        Raises:
            RuntimeError: after `close`.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._pool.submit(self._run_next)
            self._waiting.setdefault(client, deque()).append((future, call, args))
        return future

    def close(self) -> None:
        """Wait for the call that runs; those that wait are not run."""
        self._pool.shutdown(cancel_futures=True)
        for calls in self._waiting.values():
            for future, _, _ in calls:
                future.cancel()

    def _run_next(self) -> None:
        with self._lock:
            client, calls = self._waiting.popitem(last=False)
            future, call, args = calls.popleft()
            if calls:
                self._waiting[client] = calls  # behind the others
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)
