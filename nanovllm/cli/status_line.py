"""One line in the terminal that says what is being done now."""

from __future__ import annotations

import shutil
import sys


class StatusLine:
    """A line on standard error that is replaced in place. Nothing is shown if standard error is not a terminal."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, text: str) -> None:
        """Replace the line. Longer text than the terminal is wide is cut at its end."""
        if sys.stderr.isatty():
            self._shown = True
            print(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._shown:
            self._shown = False
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
