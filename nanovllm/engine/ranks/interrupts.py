"""Ctrl-C while several ranks run one step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C takes effect after the block, so that it leaves no rank waiting for this one; pressed again, at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pending: list[Any] = []

    def defer(number: int, frame: Any) -> None:
        if pending:
            before(number, frame)
        pending.append(frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending:
        before(signal.SIGINT, pending[0])
