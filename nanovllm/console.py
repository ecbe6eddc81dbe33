"""What programs share: an end without a traceback, a line that says what is being done, and tables of 80 columns."""

from __future__ import annotations

import contextvars
import logging
import os
import select
import shutil
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from nanovllm.early_exit import INTERRUPTED, QuickExit, leave_quietly, raise_when_loaded
from nanovllm.status_process import CountingProcess

WIDTH = 80


def run_program(name: str, main: Callable[[], int | None], quick_exit: bool = True) -> NoReturn:
    """Run a program and exit.

    Ctrl-C, a closed pipe (`| head`), and errors that a user can mend end it without a traceback: ValueError, TypeError,
    FileNotFoundError, and RuntimeErrors of this package.

    Args:
        name: the name of the program, for messages.
        main: returns the exit code; None: 0.
        quick_exit: the process ends as `QuickExit` says; False if it may go on after this call.
    """
    raise_when_loaded(name)
    end = QuickExit() if quick_exit else None
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # Triton's default is what is wanted
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes lines of its own to standard error
    try:
        code = _exit_code(main)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        if not _reader_has_gone():  # it was another pipe, or a connection
            raise
        # The text still in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ValueError, TypeError, FileNotFoundError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not type(e).__module__.startswith("nanovllm"):
            raise
        print(erased_line(), end="", file=sys.stderr)
        say("\n".join([f"{name}: {e}", *getattr(e, "__notes__", ())]), sys.stderr)
        code = 1
    if end is not None:
        end.code = code
        leave_quietly()
    sys.exit(code)


def _reader_has_gone() -> bool:
    """Whether standard output or standard error is closed at its other end, as far as the system tells."""
    if not hasattr(select, "poll") or os.path.samestat(os.fstat(1), os.stat(os.devnull)):
        return True  # rich puts the null device in place of a closed output
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _exit_code(main: Callable[[], int | None]) -> int:
    """What `main` returns, or ends with by `sys.exit`, as typer does."""
    try:
        return main() or 0
    except SystemExit as e:
        if isinstance(getattr(e.__context__, "__cause__", None), KeyboardInterrupt):
            raise KeyboardInterrupt from None  # Ctrl-C that no command caught: typer would exit without a word
        if isinstance(e.__context__, BrokenPipeError):
            raise e.__context__ from None  # typer exits with 1
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1


def say(text: str, file: TextIO | None = None) -> None:
    """Print sentences. On a terminal, lines end between words; in a file or a pipe each line stays whole."""
    file = file or sys.stdout
    print(_folded(text) if file.isatty() else text, file=file, flush=True)


def _folded(text: str) -> str:
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=line[: len(line) - len(line.lstrip())], break_long_words=False,
                      break_on_hyphens=False) if len(line) > width else line
        for line in text.split("\n")
    )  # fmt: skip


def erased_line() -> str:
    """What takes a `StatusLine` away if standard error is a terminal, else nothing."""
    return "\r\x1b[2K" if sys.stderr.isatty() else ""


class LogFormatter(logging.Formatter):
    """Log lines for standard error: on a terminal, a line replaces the `StatusLine` and ends between words."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        text = super().format(record)
        return erased_line() + (_folded(text) if sys.stderr.isatty() else text)


def show_warnings() -> None:
    """Warnings and errors that are logged go to standard error, as `LogFormatter` writes them."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def announce(logger: logging.Logger, text: str) -> None:
    """Say what takes long: as information in the log, or on standard error if the log does not take information."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(erased_line(), end="", file=sys.stderr)
        say(text, sys.stderr)


@contextmanager
def announced(logger: logging.Logger, text: str, status_text: str) -> Iterator[None]:
    """`announce`. If a status line is shown, it says `status_text` while the block runs, and again what it said."""
    status = StatusLine.current
    if status is None or logger.isEnabledFor(logging.INFO):
        announce(logger, text)
        yield
        return
    before = status.said
    status.show(status_text, timed=True)
    try:
        yield
    finally:
        status.show(*before)


def warn(logger: logging.Logger, text: str) -> None:
    """Log a warning. In a program that has not set logging up, it is printed as `say` does, not as one long line."""
    if logger.hasHandlers() or not logger.isEnabledFor(logging.WARNING) or logging.lastResort is None:
        logger.warning("%s", text)
    else:
        print(erased_line(), end="", file=sys.stderr)
        say(text, sys.stderr)


class StatusLine:
    """A line on standard error that is replaced in place. Nothing is shown if standard error is not a terminal.

    Attributes:
        current: the one that is shown; None: none is.
        said: what `show` was last given.
    """

    current: StatusLine | None = None

    def __init__(self) -> None:
        self.said = "", False
        self._shown = False
        self._ended: threading.Event | None = None
        self._process: CountingProcess | None = None

    def show(self, text: str, timed: bool = False) -> None:
        """Replace the line. Longer text than the terminal is wide is cut at its end, before the seconds.

        Args:
            timed: from the third second on, the seconds since this call are added to the line: "loading ... 3 s". A
                process counts them where PyTorch is still to be imported, else a thread.
        """
        self._end_count()
        if not self._visible():
            return
        self._shown = True
        self.said = text, timed
        StatusLine.current = self
        self._print(text)
        if timed and CountingProcess.is_safe():
            self._process = CountingProcess(lambda seconds: self._print(text, f" {seconds} s"))
        elif timed:
            self._ended = threading.Event()
            arguments = (self._count, text, time.monotonic(), self._ended)
            # In this context a notebook knows the cell that the line belongs to.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=arguments, daemon=True, name="status line").start()

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        self._end_count()
        if self._shown:
            self._shown = False
            StatusLine.current = None if StatusLine.current is self else StatusLine.current
            print(erased_line(), end="", file=sys.stderr, flush=True)

    def _count(self, text: str, begun: float, ended: threading.Event) -> None:
        wait = 3.0
        while not ended.wait(wait):
            with _STATUS:
                if not ended.is_set():
                    self._print(text, f" {time.monotonic() - begun:.0f} s")
            wait = 1.0

    def _end_count(self) -> None:
        if self._process:
            self._process.end()
            self._process = None
        if self._ended:
            with _STATUS:  # nothing is printed after this
                self._ended.set()
            self._ended = None

    def _visible(self) -> bool:
        return sys.stderr.isatty()

    def _print(self, text: str, seconds: str = "") -> None:
        room = shutil.get_terminal_size().columns - 1 - len(seconds)
        print(f"{erased_line()}{text[:room]}{seconds}", end="", file=sys.stderr, flush=True)


class CellOutput:
    """An output of a notebook's cell that is replaced in place: a line of text, which needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    @staticmethod
    def possible() -> bool:
        """Whether this is a notebook."""
        if "IPython" not in sys.modules:
            return False
        from rich.console import Console

        return Console(stderr=True).is_jupyter

    def show(self, text: str) -> None:
        """Replace the output."""
        from IPython.display import display

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


_STATUS = threading.Lock()
"""Held while a thread prints a `StatusLine`."""


@contextmanager
def working(text: str, timed: bool = False) -> Iterator[None]:
    """Show a status line while the block runs; timed: with its seconds, as `StatusLine.show` does."""
    status = StatusLine()
    status.show(text, timed)
    try:
        yield
    finally:
        status.clear()


def import_torch() -> None:
    """Import PyTorch, which takes seconds on a slow disk or a busy machine, and say so meanwhile."""
    with working("importing PyTorch ...", timed=True):
        import torch  # noqa: F401


@dataclass(frozen=True)
class Column:
    """A column of a `TablePrinter`.

    Attributes:
        width: in characters. A longer cell is not cut: it moves the rest of its row to the right.
        number: align cells to the right.
    """

    title: str
    width: int
    number: bool = False

    def padded(self, cell: str) -> str:
        """The cell, filled with spaces to the column's width."""
        return cell.rjust(self.width) if self.number else cell.ljust(self.width)


class TablePrinter:
    """Prints a table row by row.

    Args:
        columns: with one space between them at most `WIDTH` characters wide.
        title: printed above the table.

    Raises:
        ValueError: the columns are too wide.
    """

    def __init__(self, *columns: Column, title: str = "") -> None:
        from rich.console import Console

        width = sum(column.width + 1 for column in columns) - 1
        if width > WIDTH:
            raise ValueError(f"columns of {width} characters: expected at most {WIDTH}")
        self._columns = columns
        self._title = title
        self._begun = False
        self._notes: list[str] = []
        self._console = Console(soft_wrap=True, highlight=False, markup=False)

    def note(self, text: str) -> str:
        """The mark of a footnote, such as "[1]". Equal texts share one footnote, which `end` prints."""
        if text not in self._notes:
            self._notes.append(text)
        return f"[{self._notes.index(text) + 1}]"

    def add(self, *cells: str, style: str = "") -> None:
        """Print a row, in one of rich's styles ("bold", "red")."""
        if not self._begun:
            self._begun = True
            if self._title:
                self._console.print(self._title, style="bold")
            self._line([column.title for column in self._columns], "underline")
        self._line(cells, style)

    def end(self) -> None:
        """Print the footnotes."""
        for i, text in enumerate(self._notes, 1):
            mark = f"[{i}] "
            self._console.print(textwrap.fill(text, WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark),
                                              break_long_words=False, break_on_hyphens=False))  # fmt: skip

    def _line(self, cells: Sequence[str], style: str) -> None:
        text = " ".join(column.padded(cell) for column, cell in zip(self._columns, cells, strict=True))
        self._console.print(text.rstrip(), style=style)
        self._console.file.flush()  # a reader behind a pipe sees the row now
