"""One call at a time, also where interrupts come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ReentrancyGuard:
    """Runs one function at a time; to call a second one meanwhile, in whatever thread, is an error.

    Each call appends an object to a deque, which is atomic, and may run if that is the first. A lock would not do:
    an interrupt on leaving `with lock:` would leave it locked.
    """

    def __init__(self, error: str) -> None:
        self._error = error
        self._calls: deque[object] = deque()

    def run(self, function: Callable[[], T]) -> T:
        call = object()
        try:
            try:
                self._calls.append(call)
                if self._calls[0] is not call:
                    raise RuntimeError(self._error)
                return function()
            finally:
                self._end(call)
        finally:  # again, since an interrupt may have come at the first time
            self._end(call)

    def _end(self, call: object) -> None:
        if call in self._calls:
            self._calls.remove(call)
