"""The seconds of a status line, counted by a process of its own.

The import of PyTorch holds Python's lock while the system maps and links its libraries. That takes seconds on a slow
disk, and no thread of Python runs meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class CountingProcess:
    """Shows the seconds since it was made, from the third one on, until `end` is called or this process has ended.

    Args:
        show: (seconds) -> None; called in the other process.
    """

    def __init__(self, show: Callable[[int], None]) -> None:
        parent_has_ended, self._alive = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(parent_has_ended)
            return
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the program is the parent's
            os.close(self._alive)
            begun, wait = time.monotonic(), 3.0
            while not select.select([parent_has_ended], [], [], wait)[0]:
                show(round(time.monotonic() - begun))
                wait = 1.0
        finally:
            os._exit(0)  # what follows in the program is the parent's work

    @staticmethod
    def is_safe() -> bool:
        """Whether this process can be forked: it has one thread, and has not imported what starts others.

        Standard error is that of the system, which the other process shares.
        """
        one_thread = threading.active_count() == 1 and not {"torch", "numpy"} & sys.modules.keys()
        return hasattr(os, "fork") and one_thread and sys.stderr is sys.__stderr__

    def end(self) -> None:
        """Nothing is shown after this."""
        with suppress(ProcessLookupError, ChildProcessError):  # where the program ignores SIGCHLD
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._alive)
