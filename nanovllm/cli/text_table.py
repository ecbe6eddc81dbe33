"""Tables in the width of the terminal: words and numbers stay whole, text goes on in the next line, nothing is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_TEXT = 60
"""Characters of a text cell in one line: longer lines would put the next column far away from the first one."""


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = (), title: str = "",
    footer: Sequence[str] = (), wide: bool = False,
) -> None:  # fmt: skip
    """Print a table. It is wider than the terminal only where the longest words and numbers do not fit.

    Args:
        headings: the headings of the columns; a line feed divides one into lines.
        text: the headings of the columns whose cells may go on in the next line. The others are numbers.
        title: printed above the table.
        footer: one cell for each column, or nothing.
        wide: where the output is no terminal, one line for each row, however long it is.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    rows = list(rows)
    columns = [[heading, *(row[i] for row in rows), *footer[i : i + 1]] for i, heading in enumerate(headings)]
    widths = [max(map(len, "\n".join(cells).split("\n"))) for cells in columns]
    gap = 2
    if console.is_terminal or not wide:
        least = [
            max(map(len, "\n".join(cells).split())) if heading in text and "".join(cells) else width
            for heading, cells, width in zip(headings, columns, widths)
        ]
        widths = [max(low, min(width, _MOST_TEXT)) for low, width in zip(least, widths)]
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= console.width else 1
        _shrink(widths, least, console.width - gap * (len(widths) - 1))
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, show_footer=bool(footer)
    )  # fmt: skip
    for i, (heading, width) in enumerate(zip(headings, widths)):
        table.add_column(
            heading, footer[i] if footer else "", justify="left" if heading in text else "right", width=width,
            no_wrap=heading not in text, vertical="top",
        )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    if title:
        console.print(title, style="bold", soft_wrap=True)
    console.width = max(console.width, sum(widths) + gap * (len(widths) - 1))
    with console.capture() as captured:
        console.print(table, soft_wrap=True)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _shrink(widths: list[int], least: Sequence[int], total: int) -> None:
    """Take characters from the widest column that has some to give, until `total` is enough or none is left."""
    while sum(widths) > total:
        spare = [i for i, (width, low) in enumerate(zip(widths, least)) if width > low]
        if not spare:
            return
        widths[max(spare, key=lambda i: widths[i])] -= 1
