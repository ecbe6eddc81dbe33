"""The ends of a program: Ctrl-C while it imports, an exit that does not take PyTorch apart, an end with its parent."""

import atexit
import gc
import logging
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
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


@contextmanager
def importing_engine() -> Iterator[None]:
    """Within the block, which imports PyTorch, Ctrl-C never cuts that import in two.

    PyTorch's C++ code may drop a KeyboardInterrupt or abort the process, and cannot be imported again after one. So
    Ctrl-C is a KeyboardInterrupt once PyTorch is imported: the `finally` blocks of a script run. If nothing catches it
    in a script that imports the package itself, one line is printed in place of fifty lines of imports.

    This is for the main thread of a program without a handler of its own. After the block Ctrl-C is what it was.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is not signal.default_int_handler:
        yield
        return
    handler = _RaiseLater(_importing_script())
    signal.signal(signal.SIGINT, handler)
    try:
        import torch  # noqa: F401  alone, so that Ctrl-C need not wait for what else the block imports

        handler.interrupt_if_pressed()
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        handler.interrupt_if_pressed()


def is_interactive() -> bool:
    """Whether this is a prompt of Python or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "IPython" in sys.modules


def _importing_script() -> str:
    """The name of the script whose import statement has led here; "" at a prompt, in a notebook, below a framework."""
    if is_interactive():
        return ""
    frame = sys._getframe()
    while frame.f_back and re.match(_ON_THE_WAY, str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    name, file = (frame.f_globals.get(key) for key in ("__name__", "__file__"))
    return os.path.basename(file) if name == "__main__" and file else ""


_ON_THE_WAY = r"(nanovllm(\..*)?|contextlib|importlib\._bootstrap(_external)?|_frozen_importlib(_external)?)$"
"""Modules between an import statement and this one. Python's import functions are in those with the last names until a
program imports `importlib`.
"""


def exit_with_parent() -> None:
    """End this process within a second after its parent, whatever this process waits for then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class QuickExit:
    """Ends this process once Python has joined its threads and called the functions that were registered for its exit.

    What would follow destroys all objects of PyTorch and Triton, one by one: 0.5 to 1.5 s in which a program has
    printed everything and does not end. Where CUDA is in use or coverage is measured the exit is Python's own, since
    profilers and coverage write their results then.

    Make it before other modules are imported. Functions that are registered earlier are called later, so where there
    are such, of `multiprocessing` or `tempfile` for example, the exit is Python's own as well. So it is where a file is
    open for writing, such as a plugin's log: its destruction writes what it holds in memory.

    Attributes:
        code: the exit code; None: the exit is Python's own, for example after an exception that nobody caught.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        # `logging` is imported here, so its function is registered always. Another Python than CPython may not count.
        self._is_last = getattr(atexit, "_ncallbacks", lambda: 2)() <= 1
        atexit.register(self._end)

    def _end(self) -> None:
        torch = sys.modules.get("torch")
        if any(map(_is_written_file, _open_numbers())):
            gc.unfreeze()  # the interpreter does not destroy what is frozen
            return
        if self.code is None or not self._is_last or torch is None or "coverage" in sys.modules:
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


def _open_numbers() -> list[int]:
    """The open descriptors but those of the standard streams; where no folder has them, the first 4096."""
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        numbers = list(range(4096))
    return [number for number in numbers if number > 2]


def _is_written_file(number: int) -> bool:
    """Not a pipe: it could be full, and nobody read from it."""
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return False
        import fcntl

        return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except ImportError:
        return True
    except OSError:
        return False


def raise_when_loaded(name: str) -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, except while PyTorch is being imported.

    PyTorch's C++ code turns a KeyboardInterrupt of that time into an abort, or drops it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Leave) or handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Leave(name, torch_alone=True))


def leave_quietly() -> None:
    """The program has ended: from now on the first Ctrl-C does nothing, and the second ends this process at once.

    A KeyboardInterrupt in a function that Python calls at its exit would be printed with a traceback.
    """
    if isinstance(signal.getsignal(signal.SIGINT), _Leave):
        signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED)))


class _Leave:
    def __init__(self, name: str, torch_alone: bool = False) -> None:
        self._name = name
        self._torch_alone = torch_alone

    def __call__(self, *_: Any) -> NoReturn:
        if self._torch_alone and not _torch_is_importing():
            raise KeyboardInterrupt
        # Not sys.exit: a SystemExit runs into the same C++ code. In a program of the package no user's code has begun.
        with suppress(Exception):  # closed, or interrupted in the middle of a write
            sys.stdout.flush()
        os.write(2, f"\n{self._name}: interrupted\n".encode())
        os._exit(INTERRUPTED)


class _RaiseLater:
    """Raises KeyboardInterrupt, but only notes Ctrl-C while PyTorch is being imported.

    Args:
        script: the name of the script that imports the engine, or "".
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._is_pressed = False

    def __call__(self, *_: Any) -> None:
        if self._script and not self._is_pressed and _torch_is_importing() and os.isatty(2):
            os.write(2, f"\n{self._script}: interrupted; it ends when PyTorch is imported\n".encode())
        self._is_pressed = True
        if not _torch_is_importing():
            self.interrupt_if_pressed()

    def interrupt_if_pressed(self) -> None:
        """Raise a KeyboardInterrupt that shows no traceback if nothing in the script catches it."""
        if not self._is_pressed:
            return
        self._is_pressed = False
        error = KeyboardInterrupt()
        if self._script:
            vars(error)[_SCRIPT] = self._script  # of exactly that class: by it Python knows that Ctrl-C ends it
            sys.excepthook = _OneLine(sys.excepthook)
        raise error


_SCRIPT = "_nanovllm_script"


class _OneLine:
    """In place of `sys.excepthook`: no traceback of a KeyboardInterrupt from the time of the import."""

    def __init__(self, others: Callable[..., Any]) -> None:
        self._others = others

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if script := getattr(error, _SCRIPT, None):
            print(f"\n{script}: interrupted", file=sys.stderr)
        else:
            self._others(kind, error, traceback)


def _torch_is_importing() -> bool:
    return getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
