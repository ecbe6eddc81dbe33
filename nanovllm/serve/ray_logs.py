"""What replicas on this machine write to standard error, on that of the program that started them.

Ray gives a replica's standard error to a file of its own, and so for the engine's process, which the replica starts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_END = b"\0"
_END_SECONDS = 5.0


@contextmanager
def shared_stderr() -> Iterator[str]:
    """Within the block, what others write to the named pipe of this path goes to standard error."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-") as folder:  # which only this user may enter
        path = os.path.join(folder, "stderr")
        os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_RDWR)  # for writing, too, so that it does not end with its first writer
        ended = threading.Event()
        thread = threading.Thread(target=_copy, args=(pipe, ended), name="standard error of replicas", daemon=True)
        thread.start()
        try:
            yield path
        finally:
            ended.set()
            os.write(pipe, _END)
            thread.join(_END_SECONDS)
            if not thread.is_alive():
                os.close(pipe)


def _copy(pipe: int, ended: threading.Event) -> None:
    """It goes on whatever replicas write, and if standard error is closed: a full pipe would stop the replicas."""
    with open(2, "wb", buffering=0, closefd=False) as stderr:
        while True:
            data = os.read(pipe, 1 << 16)
            with suppress(OSError):
                stderr.write(data.replace(_END, b""))
            if _END in data and ended.is_set():
                return


def write_there(path: str) -> None:
    """From now on the standard error of this process, and of those that it starts, is the pipe of `shared_stderr`."""
    pipe = os.open(path, os.O_RDWR)
    os.dup2(pipe, 2)
    os.close(pipe)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # in place of Ray's, which writes to a log of Ray Serve
