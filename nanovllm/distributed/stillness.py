"""Whether a thread moves. A GPU or a library may wait for another rank for ever, and neither a signal nor an exception
ends such a call; another thread can see it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import _base as _futures
from pathlib import Path
from types import FrameType
from typing import Any

_MOST_BETWEEN_LOOKS = 3.0
"""Seconds that count between two looks. A machine or a process that was suspended comes back much later."""
_PACKAGE = Path(__file__).parents[1]
_OTHERS_WORK = {subprocess.__file__, _futures.__file__}
"""Files of Python in which a thread waits for a program or for threads that it has started, such as compilers. The
threads of a pool run another file, so one that is still there is seen.
"""


class Stillness:
    """For how long a thread has been at one place of its program. One thread looks.

    A thread that waits for a program or for threads that it has started, such as compilers, counts as one that moves.
    At the same place again may be a later turn of a loop: `reset` tells that a step of it begins.

    Attributes:
        seconds: since the thread has moved, as far as `look` has seen.
        place: where it is: a function of this package, its file and line.
    """

    def __init__(self) -> None:
        self.seconds, self.place = 0.0, ""
        self._seen: Any = None
        self._looked = time.monotonic()

    def reset(self) -> None:
        """The thread has moved, or another one is to be looked at."""
        self._seen, self.seconds = None, 0.0

    def look(self, thread: int) -> None:
        """Look where the thread is, which is named by its `threading.get_ident()`."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        frame = sys._current_frames().get(thread)
        seen, self.place = _where(frame)
        if seen is None or seen != self._seen:
            self._seen, self.seconds = seen, 0.0
        else:
            self.seconds += min(since, _MOST_BETWEEN_LOOKS)


def _where(frame: FrameType | None) -> tuple[Any, str]:
    """(what differs as soon as the thread moves, the innermost place in this package); None: it cannot be said."""
    seen, place = [], ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _OTHERS_WORK:
            return None, ""
        seen.append((code, frame.f_lasti))
        path = Path(code.co_filename)
        if not place and _PACKAGE in path.parents:
            place = f"{code.co_name} ({path.relative_to(_PACKAGE.parent)}:{frame.f_lineno})"
        frame = frame.f_back
    return (tuple(seen) or None), place


def tell_moves(tell: Callable[[str, str], object], seconds: float) -> None:
    """While the main thread moves, tell ("moves", "") again and again, several times in `seconds`; once it has been
    still for about so long, ("still", its place). tell: is called by another thread.
    """
    main, interval = threading.main_thread().ident, seconds / 10
    assert main is not None

    def watch() -> None:
        stillness, told_still = Stillness(), False
        while True:
            time.sleep(interval)
            stillness.look(main)
            try:
                if stillness.seconds == 0.0:
                    tell("moves", "")
                    told_still = False
                elif not told_still and stillness.seconds >= 0.8 * seconds:
                    tell("still", stillness.place)
                    told_still = True
            except OSError:  # rank 0 has ended
                return

    threading.Thread(target=watch, name="stillness", daemon=True).start()
