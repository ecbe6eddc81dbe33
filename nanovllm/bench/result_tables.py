"""Tables of results as text and as Markdown."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.job import ResultRow
from nanovllm.bench.results import Check, Record, configuration, find, load_runs, settings
from nanovllm.console import WIDTH

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

HEAD = (
    "workload", "engine", "out tok/s", "spread", "total tok/s", "TTFT ms", "TTFT p99", "ITL ms", "ITL p99",
    "seconds", "GB", "MBU", "MFU", "of limit",
)  # fmt: skip


_NARROW = ("workload", "engine", "out tok/s", "spread", "TTFT ms", "ITL ms", "GB", "of limit")
"""What fits a terminal of 80 columns."""


def name_of(row: ResultRow) -> str:
    """The engine and its configuration. "default" instead of "custom" where no custom kernel ran."""
    variant = row.variant.replace("custom", "default", 1) if _ran_references(row) else row.variant
    return f"{row.engine} {variant}".strip()


def _ran_references(row: ResultRow) -> bool:
    """Whether every op of a row of ours ran its reference."""
    return set(row.about.get("kernels", {}).values()) == {"native"}


def error_lines(rows: Sequence[ResultRow]) -> list[str]:
    """Why rows have no figures: a line for each reason, with all workloads of the engine that it stopped."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            found.setdefault((name_of(row), row.error), []).append(row.workload)
    return [_folded(f"not measured: {name}, {', '.join(names)}: {why}") for (name, why), names in found.items()]


def row_cells(row: ResultRow) -> list[str]:
    """The figures of a row without an error, in the order of `HEAD`."""
    return [
        row.workload, name_of(row), number(row.median("output_rate")), percent(row.spread),
        number(row.median("total_rate")), ms(row.median("ttft_p50")), ms(row.median("ttft_p99")),
        ms(row.median("itl_p50")), ms(row.median("itl_p99")), number(row.median("seconds"), 3),
        number(None if row.peak_memory is None else row.peak_memory / 1e9, 1), percent(row.mbu), percent(row.mfu),
        percent(row.limit),
    ]  # fmt: skip


def _folded(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


class TextTable:
    """Rows as they come, in columns of fixed width: of 80 characters, or with `wide` all columns of `HEAD`."""

    def __init__(self, wide: bool) -> None:
        self._columns = [HEAD.index(name) for name in (HEAD if wide else _NARROW)]
        self._widths = [13, 16, *(max(6, len(name)) for name in HEAD[2:])]

    def head(self) -> str:
        return self._line(HEAD)

    def row(self, row: ResultRow) -> str:
        """One line; a name that is too long stands above its figures. The reason of a failure is not in it."""
        if row.error is not None:
            return f"{row.workload:<13} {name_of(row)}: not measured, see below"
        cells = row_cells(row)
        if len(cells[1]) > self._widths[1]:
            return f"{cells[0]}  {cells[1]}\n{self._line(['', '', *cells[2:]])}"
        return self._line(cells)

    def _line(self, cells: Sequence[str]) -> str:
        return " ".join(f"{cells[i]:{'<' if i < 2 else '>'}{self._widths[i]}}" for i in self._columns)


_FOREIGN = 0.1  # processors that the system's own services may use


def foreign_load(row: ResultRow) -> float:
    """The most processors that other processes used in a repeat; 0 if it was no more than a system's own services."""
    load = max((r.foreign_load or 0.0 for r in row.repeats), default=0.0)
    return load if load > _FOREIGN else 0.0


def load_lines(rows: Sequence[ResultRow]) -> list[str]:
    """A line for each row that was measured beside other processes."""
    return [
        f"{row.workload}, {name_of(row)}: other processes used up to {load:.1f} processors meanwhile"
        for row in rows
        if (load := foreign_load(row))
    ]


def comparison_lines(rows: Sequence[ResultRow]) -> list[str]:
    """What custom kernels bring, what each op's is worth, and how engines stand to each other, a line each."""
    lines = []
    for row in rows:
        if row.engine != "nanovllm" or row.error is not None or not row.variant.startswith("custom"):
            continue
        native = find(rows, "nanovllm", "native", row.workload, row.model)
        if native is not None and _ran_references(row):
            device = row.about.get("device", "this device")
            lines.append(f"{row.workload}: both rows ran the reference, since no custom kernel ran on {device}")
        elif native is not None:
            lines.append(f"{row.workload}: custom kernels are {_times(row, native)} native")
        for other in rows:
            if (other.workload, other.model) != (row.workload, row.model) or other.error is not None:
                continue
            if other.variant.startswith("no "):
                op = other.variant.removeprefix("no ")
                lines.append(
                    f"{row.workload}: {op}'s custom kernel is worth {gain(row, other):+.1%}"
                    f" (without it {number(other.median('output_rate'))} tok/s)"
                )
            elif other.engine == row.engine and other.variant == "plugin":
                times = f"{_times(other, row)} nanovllm without{_of_rounds(other, row)}"
                lines.append(f"{row.workload}: nanovllm with the plugin is {times}")
            elif other.engine != row.engine:
                peer = f"{other.engine} {other.about.get('version', '')}".rstrip()
                lines.append(f"{row.workload}: nanovllm is {_times(row, other)} {peer}{_of_rounds(row, other)}")
    return lines


def gain(row: ResultRow, without: ResultRow) -> float:
    """How much faster `row` is, of 1: the median over the rounds that have both, or without one that of the medians."""
    if ratios := _ratios(row, without):
        return statistics.median(ratios) - 1
    return (row.median("output_rate") or 0.0) / (without.median("output_rate") or 1.0) - 1


def _times(row: ResultRow, other: ResultRow) -> str:
    return f"{gain(row, other) + 1:.2f}x"


def _of_rounds(row: ResultRow, other: ResultRow) -> str:
    """What the ratio is a median of, where there are several rounds."""
    ratios = _ratios(row, other)
    return f" ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)" if len(ratios) > 1 else ""


def _ratios(row: ResultRow, other: ResultRow) -> list[float]:
    """The ratio of the two rates in each round that has both: what slows a machine for minutes slows both."""
    rates, others = row.medians("output_rate"), other.medians("output_rate")
    return [rate / others[number] for number, rate in rates.items() if others.get(number)]


def check_lines(checks: Sequence[Check]) -> list[str]:
    return [
        f"{'ok  ' if c.holds else 'FELL'} {c.workload}: {c.what} {c.now:.3f}, kept {c.kept:.3f} ({c.commit}),"
        f" may fall by {c.allowed:.0%}"
        for c in checks
    ]


def history_lines(path: Path) -> list[str]:
    """How a workload moved: under each configuration a line for each kept run, with the change to the one before it."""
    moved: dict[tuple[str, ...], list[str]] = {}
    before: dict[tuple[str, ...], float] = {}
    for run in load_runs(path):
        for row in run.rows:
            key, rate = configuration(run, row), row.median("output_rate") or 0.0
            words = row.load, row.model, name_of(row), *_special(run, row)
            lines = moved.setdefault(key, [_folded("  " + ", ".join(words))])
            change = f"{rate / before[key] - 1:+.1%}" if before.get(key) else ""
            before[key] = rate
            lines.append(
                f"    {run.date:16}  {run.commit + '*' * run.dirty:11} {number(rate):>9} {change:>8} "
                f"{percent(row.limit):>8}  {run.versions.get('torch', '?')}"
            )
    columns = f"    {'date':16}  {'commit':11} {'out tok/s':>9} {'change':>8} {'of limit':>8}  torch"
    return [f"{path.stem} on {path.parent.name}", columns, *(line for lines in moved.values() for line in lines)]


def _special(run: Record, row: ResultRow) -> list[str]:
    """What sets a row apart from others of its engine."""
    words = run.arguments.get("dtype"), settings(run, row)
    return [w for w in words if w]


def markdown(files: Sequence[Path]) -> str:
    """The last kept row of every configuration, by device, as Markdown tables."""
    parts = []
    for folder in dict.fromkeys(path.parent for path in files):
        latest: dict[tuple[str, ...], tuple[Record, ResultRow]] = {}
        for path in files:
            if path.parent == folder:
                for run in load_runs(path):
                    for row in run.rows:
                        latest[configuration(run, row)] = run, row
        if not latest:
            continue
        first = next(iter(latest.values()))[0]
        device = first.rates.device if first.rates else folder.name
        parts.append(f"**{device}**\n")
        head = "workload", "model", "engine", "output tok/s", "spread", "TTFT ms", "ITL ms", "of the limit", "measured"
        parts.append(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
        order = {key: (row.workload, row.model, row.engine, row.variant, *key) for key, (_, row) in latest.items()}
        for key in sorted(latest, key=lambda key: order[key]):
            run, row = latest[key]
            version = "" if row.engine == "nanovllm" else f" {row.about.get('version', '')}"
            engine = ", ".join([f"{row.engine}{version} {row.variant}".strip(), *_special(run, row)])
            cells = (
                f"{row.workload}: {row.load}", row.model, engine, number(row.median("output_rate")),
                percent(row.spread), ms(row.median("ttft_p50")), ms(row.median("itl_p50")), percent(row.limit),
                f"{run.date[:10]}, {run.commit}{'*' if run.dirty else ''}, torch {run.versions.get('torch', '?')}",
            )  # fmt: skip
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def write_between_markers(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between two markers in a file; a ValueError if it has none."""
    content = path.read_text()
    before, _, rest = content.partition(begin)
    if end not in rest:
        raise ValueError(f"{path} has no lines {begin} and {end}, between which the tables go; add them")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}")


def number(value: Any, digits: int = 0) -> str:
    """With thousands separators; values below 100 get a decimal where none were asked for."""
    if value is None:
        return "-"
    return f"{value:,.{max(digits, 1) if abs(value) < 100 else digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.2f}"
