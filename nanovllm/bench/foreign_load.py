"""How busy other processes kept this machine's processors while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class ForeignLoad:
    """Processors that other processes used since this was made, on average. Linux alone; elsewhere None."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """Processor-seconds of other processes a second."""
        busy, elapsed = _busy_seconds(), time.perf_counter() - self._started
        if busy is None or self._busy is None or not elapsed:
            return None
        return max(0.0, busy - self._busy - (_own_seconds() - self._own)) / elapsed


def _busy_seconds() -> float | None:
    try:
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
