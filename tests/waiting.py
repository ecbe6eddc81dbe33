"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LONG = 300.0
"""Seconds after which something hangs, on a slow and busy machine, too."""


def wait_until(condition: Callable[[], object], seconds: float = LONG) -> None:
    """Return once the condition is true; after so many seconds the test fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)
