"""How a process that ran a kernel ended, in words: the signal, the line of the kernel, and what to look for."""

from __future__ import annotations

import linecache
import re
import signal
from pathlib import Path
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)
_LIBRARIES = re.compile(r"/site-packages/|/dist-packages/|/lib/python3|/kernels/testing/|^<")
_ACCESS = re.compile(r" in \w*(load|store|atomic)")
"""In Triton's interpreter the function that accesses memory is named for what it does."""
_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


class End(NamedTuple):
    """How a process ended. `hung`: a case took longer than allowed."""

    text: str
    hung: bool


def describe(code: int, stack: str, limit: float) -> End:
    """How a process ended.

    Args:
        code: as of `multiprocessing.Process.exitcode`: negative if a signal ended the process.
        stack: what faulthandler wrote, the innermost call first.
        limit: the seconds after which faulthandler ended the process.
    """
    place, above = _place(stack)
    if stack.startswith("Timeout"):
        return End(f"hung: it took longer than {limit:g} s{place}", True)
    if code >= 0:
        return End(f"crashed: it ended the process with code {code}{place}", False)
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return End(f"crashed ({name}): was the machine out of memory?", False)
    if -code not in _MEMORY_SIGNALS:
        return End(f"crashed ({name}){place}", False)
    access = _ACCESS.search(above)
    return End(f"crashed ({name}){place}: a {access[1] if access else 'load or store'} without a mask?", False)


def _place(stack: str) -> tuple[str, str]:
    """(" at file:line, `source`" of the innermost line outside of libraries, the stack above it); empty if there is
    none.
    """
    # Of several threads, the last one printed is the main one, where the case ran.
    main = stack[max(0, stack.rfind("hread 0x")) :]
    for frame in _FRAME.finditer(main):
        if not _LIBRARIES.search(frame["path"]):
            source = linecache.getline(frame["path"], int(frame["line"])).strip()
            return f" at {Path(frame['path']).name}:{frame['line']}, `{source}`", main[: frame.start()]
    return "", ""
