"""What `apply` did to a model, as a table, and the way back."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm.adapters.transformers.selected import NOT_WANTED

if TYPE_CHECKING:
    from nanovllm.adapters.transformers.patches import Patches


@dataclass(frozen=True)
class Row:
    """Modules of one class, and what became of them.

    Attributes:
        module: the name of the class.
        op: what was put in, or what would have been.
        provider: of the op; empty if the modules were left alone.
        count: how many modules.
        why: what a reader must know: under which condition the op runs, or why the modules were left alone.
    """

    module: str
    op: str
    provider: str
    count: int
    why: str = ""


@dataclass
class Report:
    """What was replaced in a model and what was left. As a context manager it takes everything back at the end.

    Attributes:
        rows: one for each class of modules, op and outcome.
        notes: what concerns the whole model.
    """

    rows: list[Row]
    notes: list[str]
    _patches: Patches = field(repr=False)

    @property
    def replaced(self) -> list[Row]:
        """The rows of modules that got an op."""
        return [row for row in self.rows if row.provider]

    @property
    def left(self) -> list[Row]:
        """The rows of modules that were left alone."""
        return [row for row in self.rows if not row.provider]

    def undo(self) -> None:
        """Give the model its own code back. Weights have the same bits as before. A second call does nothing."""
        self._patches.undo()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def table(self) -> Any:
        """The report as a `rich.table.Table`."""
        from rich.table import Table

        title = None if self.replaced else "nothing was replaced"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("class", "op", "provider", "modules", "remark"):
            table.add_column(column, justify="right" if column == "modules" else "left", no_wrap=column != "remark")
        for row in [*self.replaced, *self.left]:
            table.add_row(row.module, row.op, row.provider or "left", str(row.count), row.why)
        return table

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield self.table()
        yield from self.notes

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same table where a notebook shows a cell's last value."""
        printer.text(str(self))

    def __str__(self) -> str:
        from rich.console import Console

        width = min(shutil.get_terminal_size(fallback=(120, 24)).columns, 120)
        console = Console(width=width, color_system=None, force_jupyter=False)  # a notebook would get an empty output
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


class Outcomes:
    """Counts what becomes of modules."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str, str]] = Counter()

    def replaced(self, module: Any, op: str, provider: str, why: str = "") -> None:
        self._counts[type(module).__name__, op, provider, why] += 1

    def left(self, module: Any, op: str, why: str) -> None:
        if why != NOT_WANTED:
            self.replaced(module, op, "", why)

    def rows(self) -> list[Row]:
        return [Row(module, op, provider, n, why) for (module, op, provider, why), n in self._counts.items()]
