"""The tables of `nanovllm fuse`: predicted groups, merges that were left out, and measured groups."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.cli.text_table import print_table
from nanovllm.fuse.analyzer import FusionReport, GroupRow
from nanovllm.fuse.group_timing import Agreement, Comparison, GroupTiming


def print_groups(report: FusionReport, wide: bool) -> None:
    """The groups in the order in which they run. wide: also the bytes that they move."""
    headings = ["#", "one kernel of", "kernels", "us", "fused\nus", "saved\nus", "our op"]
    totals = [
        "", "sum", f"{sum(len(r.group.kernels) for r in report.rows)}", f"{1e6 * report.unfused:.1f}",
        f"{1e6 * report.fused:.1f}", f"{1e6 * (report.unfused - report.fused):.1f}", "",
    ]  # fmt: skip
    rows = []
    for r in report.rows:
        several = len(r.group.kernels) > 1
        fused = [f"{1e6 * r.fused:.1f}", f"{1e6 * r.gain:.1f}"] if several else ["", ""]
        rows.append(
            [f"{r.number}", _with_limits(r), f"{len(r.group.kernels)}", f"{1e6 * r.unfused:.1f}", *fused, str(r.served)]
        )
    if wide:
        headings += ["KB", "fused\nKB"]
        for moved in (
            [r.group.unfused_bytes / 1e3 for r in report.rows],
            [r.estimate.bytes / 1e3 for r in report.rows],
        ):
            totals.append(f"{sum(moved):,.0f}")
            rows = [[*row, f"{kilobytes:,.0f}"] for row, kilobytes in zip(rows, moved)]
    print_table(headings, rows, ("one kernel of", "our op"), footer=totals, wide=wide)


def print_left_out(report: FusionReport) -> None:
    """Merges that were not made, and why."""
    rows = [
        (d.producer, d.consumer, f"{1e6 * d.gain:.2f}" if d.gain else "", d.reason)
        for d in report.decisions
        if not d.made
    ]
    print_table(("producer", "consumer", "gain us", "why"), rows, ("producer", "consumer", "why"), "Not merged")


def print_measured(rows: Sequence[Comparison]) -> None:
    """Predicted beside measured microseconds, then why something was not measured or not compared."""
    headings = (
        "#", "one kernel of", "inputs\nin", "unfused\npred.", "unfused\nmeas.", "fused\npred.", "compile\nmeas.",
        "our ops\nmeas.", "our op",
    )  # fmt: skip
    cells = [
        (
            f"{r.number}", r.ops, r.inputs, _us(r.predicted_unfused), _cell(r.unfused),
            _us(r.predicted_fused), _cell(r.compile), _cell(r.ours), r.served,
        )
        for r in rows
    ]  # fmt: skip
    print_table(headings, cells, ("one kernel of", "our op"))
    for line in missing(rows):
        print(line)


def missing(rows: Sequence[Comparison]) -> list[str]:
    """One line for every reason why something was not measured, or was not compared."""
    found: dict[str, list[str]] = {}
    for r in rows:
        for way in ("unfused", "compile", "ours"):
            m: GroupTiming = getattr(r, way)
            if not m.reason or m.reason == "not asked for":
                continue
            line = f"not measured: {way}, group {{}}: {m.reason}" if m.seconds is None else f"group {{}}: {m.reason}"
            numbers = found.setdefault(line, [])
            if str(r.number) not in numbers:
                numbers.append(str(r.number))
    return [line.format(", ".join(numbers)) for line, numbers in found.items()]


def agreement_line(found: Agreement) -> str:
    """How well the predictions agree with the measurements, in two lines."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    rank = "- (needs three groups of several kernels)" if found.rank is None else f"{found.rank:.2f}"
    return (
        f"rank correlation of predicted and measured gains: {rank}\n"
        f"median error of the prediction: unfused {percent(found.unfused_error)}, fused {percent(found.fused_error)}"
    )


def _cell(m: GroupTiming) -> str:
    return "-" if m.seconds is None else _us(m.seconds)


def _us(seconds: float) -> str:
    """Microseconds; large ones, as on a CPU, without a fraction: nine columns fit 80 characters."""
    us = 1e6 * seconds
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _with_limits(r: GroupRow) -> str:
    """The operators, and in a line of its own what keeps the fused kernel from its ideal time."""
    e, found = r.estimate, []
    if len(r.group.kernels) > 1 and e.occupancy < 0.25:
        found.append(f"occupancy {100 * e.occupancy:.0f} %")
    if e.passes > 1:
        found.append(f"rows read {e.passes} times")
    if e.repeated > 5e-8:
        found.append(f"{1e6 * e.repeated:.1f} us repeated by tiles")
    return f"{r.group.name}\n({', '.join(found)})" if found else r.group.name
