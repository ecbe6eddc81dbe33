"""Tables in the terminal's width: numbers stay in one piece, text goes on in the next line, and no cell is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = (), title: str = "",
    footer: Sequence[str] = (), wide: bool = False,
) -> None:  # fmt: skip
    """Print a table.

    Args:
        headings: the headings of the columns; a line feed divides one into lines.
        text: the headings of the columns whose cells may go on in the next line. The others are numbers.
        title: printed above the table.
        footer: one cell for each column, or nothing.
        wide: do not keep to the terminal's width.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, show_footer=bool(footer)
    )  # fmt: skip
    for i, heading in enumerate(headings):
        is_text = heading in text
        table.add_column(
            heading, footer[i] if footer else "", justify="left" if is_text else "right", no_wrap=not is_text,
            overflow="fold", vertical="top",
        )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    if title:
        console.print(title, style="bold", soft_wrap=True)
    full = Measurement.get(console, console.options.update(max_width=10000), table).maximum
    if wide:
        console.width = max(console.width, full)
    elif full > console.width:
        table.padding = 0
    with console.capture() as captured:
        console.print(table, soft_wrap=wide)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
