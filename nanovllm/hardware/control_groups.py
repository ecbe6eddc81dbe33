"""Linux's control groups, by which a container gets a share of a machine.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def group_directories(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """(directory, 1 or 2) of each group that this process is in, the innermost first. The number is the version.

    Args:
        controller: "cpu" or "memory".
        root: where /proc and /sys are.
    """
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and controller)
        # In a container the mount may be the group itself, and the path that of the host.
        group = mount / path.lstrip("/")
        for directory in dict.fromkeys((group, *group.parents)):
            if directory.is_relative_to(mount):
                yield directory, 1 if controllers else 2


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: of the machine's memory, and within the limits of its control groups.

    What the system keeps of files, to read them faster, is available.

    Args:
        root: where /proc and /sys are.
    """
    described = _numbers(read(root / "proc/meminfo"))
    if "MemAvailable:" in described:
        available = described["MemAvailable:"] << 10
    else:  # not Linux, which is not known to tell
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for directory, version in group_directories("memory", root):
        limit, used = ("memory.max", "memory.current") if version == 2 else (
            "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
        values = read(directory / limit) or "", read(directory / used) or ""
        if all(value.isdecimal() for value in values):  # else there is no limit
            files = _numbers(read(directory / "memory.stat"))
            kept = files.get("inactive_file" if version == 2 else "total_inactive_file", 0)
            available = min(available, int(values[0]) - int(values[1]) + kept)
    return max(available, 0)


def read(path: Path) -> str | None:
    """The text of a file without the white space around it; None: it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _numbers(text: str | None) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    words = (line.split() for line in (text or "").splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}
