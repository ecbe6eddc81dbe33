"""The sweeps of an MLP as tables and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm.lab.mlp import Point, Sweeps
from nanovllm.lab.show import new_figure, print_table, save_figure, table_of


def show(result: Sweeps, console: Any) -> None:
    """Print a table for each sweep, and with a profile one for each of its ends."""
    b, rate = result.base, result.rates.matmul[result.dtype_name]
    console.print(
        f"Training steps of an MLP in {result.dtype_name} on {result.rates.device}: {b.steps} steps, "
        f"{b.layers} layers, batch {b.batch}, dim {b.dim}, one of them swept at a time. "
        f"Matrix products reach {rate / 1e12:,.2f} TFLOP/s here, measured.",
        highlight=False,
    )
    for name, points in result.points.items():
        table = table_of(name, "ms", "time", "flops", "TFLOP/s", "of limit", "")
        for p in points:
            value = str(getattr(p.shape, name))
            if p.seconds is None:
                table.add_row(value, *[""] * 5, p.reason)
                continue
            table.add_row(
                value, f"{1e3 * p.seconds:,.3f}", _times(p.ratio), _times(p.flops_ratio),
                f"{p.shape.flops / p.seconds / 1e12:,.2f}", f"{p.share:.0%}",
            )  # fmt: skip
        print_table(console, f"{name}: the median run, host time included", table)
        if (line := in_words(name, points)) is not None:
            console.print(line, highlight=False)
        for p in points:
            if p.ran:
                what = "kernel" if result.device.type == "cuda" else "operator"
                print_table(console, *_profile(name, p, what))


def in_words(name: str, points: tuple[Point, ...]) -> str | None:
    """What the growth between the first point and the last says; None where there is no second."""
    timed = [p for p in points if p.seconds is not None and p.ratio is not None and p.flops_ratio is not None]
    if len(timed) < 2 or timed[0] is not points[0]:
        return None
    last = timed[-1]
    assert last.ratio is not None and last.flops_ratio is not None
    line = f"{last.flops_ratio:.3g} times the arithmetic takes {last.ratio:.1f} times as long: "
    if last.ratio > 1.15 * last.flops_ratio:
        return (
            line
            + "more than in proportion; look for data that no longer fit into a cache, a lower clock, other programs."
        )
    if last.ratio > 0.85 * last.flops_ratio:
        return line + "in proportion; the limit is the same at both ends."
    if name in ("steps", "layers"):
        return line + "less than in proportion; part of a run is the same however many there are."
    return line + "less than in proportion; the small end does not fill the device, or waits for the host to launch."


def _profile(name: str, point: Point, what: str) -> tuple[str, Any]:
    """(title, table) of the kernels or operators that took longest."""
    total, count = sum(k.seconds for k in point.ran), sum(k.count for k in point.ran)
    title = f"{name} {getattr(point.shape, name)} under the profiler: {count} {what}s, {1e3 * total:,.3f} ms in them"
    table = table_of(what, "times", "us", "share")
    for k in sorted(point.ran, key=lambda k: -k.seconds)[:8]:
        table.add_row(
            k.name[:110], str(k.count), f"{1e6 * k.seconds:,.1f}", f"{k.seconds / total:.0%}" if total else ""
        )
    return title, table


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"x{ratio:.2f}"


def plot(result: Sweeps, path: Path) -> None:
    """Draw the time over each swept number, and beside it what arithmetic alone would make of the first point.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = new_figure(figsize=(3.4 * len(result.points), 3.4), layout="constrained")
    for i, (name, points) in enumerate(result.points.items()):
        axes = figure.add_subplot(1, len(result.points), i + 1)
        timed = [(p.shape, 1e3 * p.seconds) for p in points if p.seconds is not None]
        if timed:
            values = [getattr(shape, name) for shape, _ in timed]
            first, first_ms = timed[0]
            axes.plot(values, [ms for _, ms in timed], marker="o", label="measured")
            scale = [first_ms * shape.flops / first.flops for shape, _ in timed]
            axes.plot(values, scale, linestyle="--", color="black", linewidth=1, label="in proportion to flops")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(values, [str(v) for v in values])
            axes.minorticks_off()
            axes.legend(frameon=False, fontsize=8)
        axes.set(xlabel=name, ylabel="ms" if i == 0 else "")
    figure.suptitle(f"MLP, {result.dtype_name}, {result.rates.device}", fontsize=10)
    save_figure(figure, path)
