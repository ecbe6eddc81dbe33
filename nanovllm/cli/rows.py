"""A table for terminals of 80 columns: each row appears as soon as it is made, and long reasons become footnotes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 80


@dataclass(frozen=True)
class Column:
    """A column of `Rows`.

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


class Rows:
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
