"""Ctrl-C while a program still imports its modules: one line and an exit code, no traceback."""

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
