"""The ends of a program: Ctrl-C while it still imports its modules, and an exit that does not take PyTorch apart."""

import atexit
import logging
import os
import signal
import sys
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def leave_at_once(name: str) -> None:
    """From now on Ctrl-C ends this process at once, until `raise_when_loaded` is called.

    A handler that is not Python's own stays: a background job of a shell ignores Ctrl-C.

    Args:
        name: the name of the program, for the message.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Leave(name))


class QuickExit:
    """Ends this process once Python has joined its threads and called the functions that were registered for its exit.

    What would follow destroys all objects of PyTorch and Triton, one by one: 0.5 to 1.5 s in which a program has
    printed everything and does not end. Where CUDA is in use or coverage is measured the exit is Python's own, since
    profilers and coverage write their results then.

    Make it before other modules are imported: functions that are registered earlier are not called.

    Attributes:
        code: the exit code; None: the exit is Python's own, for example after an exception that nobody caught.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        torch = sys.modules.get("torch")
        if self.code is None or torch is None or "coverage" in sys.modules:
            return
        # Neither name is there if Ctrl-C ended the import of PyTorch; then bool() stands for False.
        cuda_in_use = getattr(getattr(torch, "cuda", None), "is_initialized", bool)
        if cuda_in_use():
            return
        try:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # closed by the reader, or by the program
            return
        if os.name == "posix":
            import ctypes

            ctypes.CDLL(None).fflush(None)  # what C++ code has printed
        os._exit(self.code)


def raise_when_loaded(name: str) -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, except while PyTorch is being imported.

    PyTorch's C++ code turns a KeyboardInterrupt of that time into an abort, or drops it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Leave) or handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Leave(name, torch_alone=True))


class _Leave:
    def __init__(self, name: str, torch_alone: bool = False) -> None:
        self._name = name
        self._torch_alone = torch_alone

    def __call__(self, *_: Any) -> NoReturn:
        torch = sys.modules.get("torch")
        if self._torch_alone and not getattr(getattr(torch, "__spec__", None), "_initializing", False):
            raise KeyboardInterrupt
        # Not sys.exit: a SystemExit runs into the same C++ code. Nothing is to be cleaned up yet.
        os.write(2, f"\n{self._name}: interrupted\n".encode())
        os._exit(INTERRUPTED)
