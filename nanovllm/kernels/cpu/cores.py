"""How many threads the C++ kernels have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nanovllm.hardware.control_groups import group_directories, read


def num_threads(setting: str | None) -> int:
    """Threads of the C++ kernels: $NANOVLLM_CPU_THREADS, else one for each core that this process may use.

    Args:
        setting: the variable's value.
    """
    if setting is not None:
        if not setting.isdecimal() or not 1 <= int(setting) < 1 << 31:  # the kernels take 32 bits
            raise ValueError(f"NANOVLLM_CPU_THREADS={setting!r}: expected a positive integer below 2^31")
        return int(setting)
    return usable_cores()


def usable_cores(root: Path = Path("/")) -> int:
    """The physical cores that this process may run on, but no more than its control group's share of time.

    A container that may use one processor's time, such as `docker run --cpus 1`, sees all processors. Linux stops its
    threads for the rest of each tenth of a second once they have used up that time together.

    Args:
        root: where /proc and /sys are.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = {
        read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed
    }
    return min(len(siblings), *(-(-quota // period) for quota, period in _quotas(root)), len(siblings))


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(microseconds of processors, in this many microseconds) of the control groups that this process is in."""
    for directory, version in group_directories("cpu", root):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(read(directory / file) or "" for file in files).split()
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # else there is none
            yield int(words[0]), int(words[1])
