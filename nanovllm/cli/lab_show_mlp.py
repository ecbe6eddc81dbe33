"""The sweeps of an MLP as tables and as a figure."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

from nanovllm.cli.lab_show import label_powers, new_figure
from nanovllm.cli.text_table import print_table
from nanovllm.lab.mlp_sweeps import Point, Sweeps
from nanovllm.wording import counted

_MANY = 10e12
"""FLOP/s of a device's limit from which on rates are in TFLOP/s: a CPU's would be 0.00."""


def show(result: Sweeps) -> None:
    """Print a table for each sweep, and the profiles of its ends."""
    b, rate = result.base, result.rates.matmul[result.dtype_name]
    unit, of_unit = ("TFLOP/s", 1e12) if rate >= _MANY else ("GFLOP/s", 1e9)
    print(
        f"Training steps of an MLP in {result.dtype_name} on {result.rates.device}\n{counted(b.steps, 'step')}, "
        f"{counted(b.layers, 'layer')}, batch {b.batch}, dim {b.dim}; each table varies one of them\n"
        f"measured limit of matrix products: {rate / of_unit:,.2f} {unit}"
    )
    for name, points in result.points.items():
        rows = []
        for p in points:
            cells = [""] * 5 if p.seconds is None else [
                f"{1e3 * p.seconds:,.3f}", *("" if r is None else f"x{r:.2f}" for r in (p.ratio, p.flops_ratio)),
                f"{p.shape.flops / p.seconds / of_unit:,.2f}", f"{p.share:.0%}",
            ]  # fmt: skip
            rows.append((f"{getattr(p.shape, name)}", *cells, p.reason or ""))
        headings = (name, "ms", "time", "flops", unit, "of limit", "")
        print_table(headings, rows, ("",), f"\n{name}: the median run, host time included")
        if (line := in_words(name, points)) is not None:
            print(textwrap.fill(line, 80))
        for p in points:
            if p.ran:
                _show_profile(name, p, "kernel" if result.device.type == "cuda" else "operator")


_NOISE = 0.8
"""A point with more arithmetic takes less than this share of the time before it only if something else disturbs it."""


def in_words(name: str, points: tuple[Point, ...]) -> str | None:
    """What the growth from the first point to the last says; None: there is no second point."""
    timed = [(p.ratio, p.flops_ratio) for p in points if p.ratio is not None and p.flops_ratio is not None]
    if len(timed) < 2 or points[0].ratio is None:
        return None
    ratio, flops_ratio = timed[-1]
    if any(later < _NOISE * earlier for (earlier, _), (later, _) in itertools.pairwise(timed)):
        return "More arithmetic took less time: the times vary too much. Run again when the machine is idle."
    if ratio > 1.15 * flops_ratio:
        why = "more than in proportion; perhaps a cache is too small, the clock is lower, or other programs run."
    elif ratio > 0.85 * flops_ratio:
        why = "in proportion; the limit is the same at both ends."
    elif name in ("steps", "layers"):
        why = f"less than in proportion; part of a run does not depend on the number of {name}."
    else:
        why = "less than in proportion; the small end does not fill the device, or waits for the host to launch."
    return f"{flops_ratio:.3g} times the arithmetic takes {ratio:.1f} times as long: {why}"


def _show_profile(name: str, point: Point, what: str) -> None:
    """The kernels or operators that took longest."""
    total, count = sum(k.seconds for k in point.ran), sum(k.count for k in point.ran)
    rows = [
        (k.name[:110], f"{k.count}", f"{1e6 * k.seconds:,.1f}", f"{k.seconds / total:.0%}" if total else "")
        for k in sorted(point.ran, key=lambda k: -k.seconds)[:8]
    ]
    title = f"\n{name} {getattr(point.shape, name)} under the profiler: {count} {what}s, {1e3 * total:,.3f} ms in them"
    print_table((what, "times", "us", "share"), rows, (what,), title)


def plot(result: Sweeps, path: Path) -> None:
    """Draw the time over each swept number, and the first time scaled with the flops.

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
            axes.set_yscale("log", base=2)
            label_powers(axes, values)
            axes.legend(frameon=False, fontsize=8)
        axes.set(xlabel=name, ylabel="ms" if i == 0 else "")
    figure.suptitle(f"MLP, {result.dtype_name}, {result.rates.device}", fontsize=10)
    figure.savefig(path, dpi=150)
