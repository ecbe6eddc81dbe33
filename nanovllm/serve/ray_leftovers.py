"""Ends what a Ray cluster leaves running when the program that started it is killed.

Ray's daemons end with that program. But HAProxy, and agents that are just being started, can stay, and hold the port.
This file is also a program of its own, which waits for the end of the other: `python ray_leftovers.py MARK`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_VARIABLE = "NANOVLLM_RAY_CLUSTER"
_GRACE_SECONDS = 5.0
"""Ray's processes have this long to end by themselves."""


@contextmanager
def leftovers_ended() -> Iterator[None]:
    """Processes that are started within the block, and their children, end soon after the block or after this
    process. On Linux.
    """
    mark = uuid.uuid4().hex
    watcher = subprocess.Popen([sys.executable, __file__, mark], stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    os.environ[_VARIABLE] = mark  # the watcher, started before, does not have it
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        watcher.stdin.close()


def _marked(variable: bytes) -> list[int]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if variable in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found


def _main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # until the other program has ended, or its block
    deadline = time.monotonic() + _GRACE_SECONDS
    while left := _marked(f"{_VARIABLE}={mark}".encode()):
        for pid in left if time.monotonic() > deadline else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    _main(sys.argv[1])
