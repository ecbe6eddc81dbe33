"""Reports of fusion as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanovllm.fuse.analyzer import FusionReport, Row
from nanovllm.fuse.measure import Agreement, Comparison, Measured

if TYPE_CHECKING:
    from rich.table import Table


def _table(title: str | None = None, show_footer: bool = False) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", show_footer=show_footer)


def groups_table(report: FusionReport) -> Table:
    """Predicted groups, in the order in which they run."""
    table = _table(show_footer=True)
    moved = [sum(getattr(r, f"{way}_bytes") for r in report.rows) / 1e3 for way in ("unfused", "fused")]
    kernels = sum(len(r.kernels) for r in report.rows)
    columns = [
        ("#", ""), ("one kernel of", "sum"), ("kernels", f"{kernels}"), ("KB", f"{moved[0]:,.0f}"),
        ("us", f"{1e6 * report.unfused:.1f}"), ("KB\nfused", f"{moved[1]:,.0f}"),
        ("us\nfused", f"{1e6 * report.fused:.1f}"),
        ("us\ngained", f"{1e6 * (report.unfused - report.fused):.1f}"), ("our op", ""),
    ]  # fmt: skip
    for heading, footer in columns:
        if heading in ("one kernel of", "our op"):
            table.add_column(heading, footer=footer, overflow="fold", min_width=20)
        else:
            table.add_column(heading, footer=footer, justify="right", overflow="fold", no_wrap=True)
    for r in report.rows:
        several = len(r.kernels) > 1
        table.add_row(
            str(r.number), "\n".join([r.ops, *_limits(r)]), str(len(r.kernels)), f"{r.unfused_bytes / 1e3:,.0f}",
            f"{1e6 * r.unfused:.1f}",
            f"{r.fused_bytes / 1e3:,.0f}" if several else "", f"{1e6 * r.fused:.1f}" if several else "",
            f"{1e6 * r.gain:.1f}" if several else "", r.served,
        )  # fmt: skip
    return table


def decisions_table(report: FusionReport) -> Table:
    """Merges that were not made, and why."""
    table = _table("Left unfused")
    for heading in ("producer", "consumer", "gain us", "why"):
        table.add_column(heading, justify="right" if heading == "gain us" else "left")
    for d in report.decisions:
        if not d.made:
            table.add_row(d.producer, d.consumer, f"{1e6 * d.gain:.2f}" if d.gain else "", d.reason)
    return table


def measured_table(rows: Sequence[Comparison]) -> Table:
    """Predicted beside measured."""
    table = _table()
    for heading in ("#", "one kernel of", "inputs in"):
        table.add_column(heading, justify="right" if heading == "#" else "left", overflow="fold")
    for heading in ("unfused us\npred.", "\nmeas.", "fused us\npred.", "compile\nmeas.", "our ops\nmeas."):
        table.add_column(heading, justify="right")
    table.add_column("our op", overflow="fold")
    for r in rows:
        table.add_row(
            str(r.number), r.ops, r.inputs, f"{1e6 * r.predicted_unfused:.1f}", _cell(r.unfused),
            f"{1e6 * r.predicted_fused:.1f}", _cell(r.compile), _cell(r.ours), r.served,
        )  # fmt: skip
    return table


def missing(rows: Sequence[Comparison]) -> list[str]:
    """One line for every reason for which something was not measured, or not compared."""
    reasons: dict[tuple[str, str], list[str]] = {}
    uncompared: dict[str, list[str]] = {}
    for r in rows:
        for way in ("unfused", "compile", "ours"):
            m: Measured = getattr(r, way)
            if m.seconds is None and m.reason != "not asked for":
                reasons.setdefault((f"not measured: {way}", m.reason), []).append(str(r.number))
            elif m.seconds is not None and m.reason and str(r.number) not in uncompared.setdefault(m.reason, []):
                uncompared[m.reason].append(str(r.number))
    lines = [f"{way}, group {', '.join(numbers)}: {reason}" for (way, reason), numbers in reasons.items()]
    return lines + [f"group {', '.join(numbers)}: {reason}" for reason, numbers in uncompared.items()]


def agreement_line(found: Agreement) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    rank = "- (needs three groups of several kernels)" if found.rank is None else f"{found.rank:.2f}"
    return (
        f"rank correlation of predicted and measured gains: {rank}; median error of the prediction: "
        f"unfused {percent(found.unfused_error)}, fused {percent(found.fused_error)}"
    )


def _cell(m: Measured) -> str:
    return "-" if m.seconds is None else f"{1e6 * m.seconds:.1f}"


def _limits(r: Row) -> list[str]:
    """What keeps a fused kernel from its ideal time, as a line of its own."""
    found = []
    if len(r.kernels) > 1 and r.occupancy < 0.25:
        found.append(f"occupancy {100 * r.occupancy:.0f} %")
    if r.passes > 1:
        found.append(f"rows read {r.passes} times")
    if r.repeated > 5e-8:
        found.append(f"{1e6 * r.repeated:.1f} us of it repeated by tiles")
    return [f"[dim]{', '.join(found)}[/]"] if found else []
