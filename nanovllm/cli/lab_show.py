"""A lesson's result as tables and sentences, and as a figure."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from nanovllm.cli.text_table import print_table
from nanovllm.console import say
from nanovllm.lab.lesson import WAYS, dtype_name
from nanovllm.lab.lesson_run import LessonResult, Listing
from nanovllm.lab.ptx import explained, resources_in_words
from nanovllm.lab.way_timing import WayRow

_TITLES = {
    "plain": "PyTorch, written out", "torch": "PyTorch's own", "compile": "torch.compile", "cuda": "CUDA C++",
    "triton": "Triton",
}  # fmt: skip


def show(result: LessonResult) -> None:
    """Print a result."""
    lesson, limit = result.lesson, result.limits
    roof = f"{limit.bandwidth / 1e9:,.0f} GB/s"
    if limit.matmul:
        roof += f", {limit.matmul / 1e12:,.2f} TFLOP/s"
    print(f"{lesson.name}: {lesson.formula}")
    say(f"{dtype_name(result.dtype)} on {limit.device}")
    say(f"measured limits: {roof}; seed {result.seed}")
    _show_checks(result)
    if result.rows:
        _show_timings(result)
    what = "kernel" if result.device.type == "cuda" else "operator"
    ran = [
        (way if i == 0 else "", f"{row.dim}" if i == 0 else "", k.name[:110], f"{k.count}", f"{1e6 * k.seconds:,.1f}")
        for way, row in {r.way: r for r in result.rows if r.ran}.items()
        for i, k in enumerate(sorted(row.ran, key=lambda k: -k.seconds)[:8])
    ]
    if ran:
        print_table(("way", "dim", what, "times", "us"), ran, ("way", what), "\nWhat ran? One call under the profiler")
    for listing in result.listings:
        _show_listing(listing, result)


def _show_checks(result: LessonResult) -> None:
    rows = []
    for c in result.checks:
        verdict = f"{len(c.failures)} wrong" if c.failures else "right" if c.cases else "nothing to compare"
        verdict = c.reason or (verdict + (f" ({c.how})" if c.how else ""))
        numbers = ("", "") if c.reason is not None else (f"{c.cases}", f"{c.error:.2f}")
        rows.append((c.way, _TITLES[c.way], *numbers, verdict))
    headings = ("way", "what", "cases", "worst error\n/ tolerance", "verdict")
    print_table(headings, rows, ("way", "what", "verdict"), "\nIs it right? Against float64, at odd sizes")
    for line in result.wrong:
        print(line)


def _show_timings(result: LessonResult) -> None:
    flops = result.limits.matmul is not None
    rate = "TFLOP/s" if flops else "GB/s"
    rows, notes, last = [], [], None
    for r in result.rows:
        if r.timing is None:
            notes.append(f"{r.way}, dim {r.dim}: {r.reason}")
            continue
        t = r.timing
        rows.append(
            (
                f"{r.dim}" if r.dim != last else "", r.way, f"{1e6 * t.median:,.1f}",
                f"{(t.p80 - t.p20) / t.median:.0%}", _megabytes(r.least_bytes),
                _megabytes(r.bytes) + ("" if r.counted else "*"),
                f"{rate_of(r, flops):,.2f}" if flops else f"{rate_of(r, flops):,.0f}", f"{r.share:.0%}",
                f"{sum(k.count for k in r.ran)}",
            )
        )  # fmt: skip
        last = r.dim
    headings = ("dim", "way", "us", "spread", "MB\nleast", "MB\nmoved", rate, "of\nlimit", "kernels")
    title = "\nHow fast? Square inputs, medians" + (", L2 cold" if result.device.type == "cuda" else "")
    if rows:
        print_table(headings, rows, ("way",), title)
        print("spread: from the 20th to the 80th percentile, over the median.")
        if not flops:
            print("GB/s: the least bytes over the time, so that ways compare.")
        print("MB moved: reads and writes of PyTorch's operations; *: not counted, the least.")
    else:
        print(title)
    never = {r.way for r in result.rows} - {r.way for r in result.rows if r.timing}
    once = [n for n in notes if n.split(",")[0] not in never or f"dim {result.rows[-1].dim}:" in n]
    for note in once:
        print(textwrap.fill(f"Not timed: {note}", 80))
    if any((r.share or 0) > 1 for r in result.rows) and result.device.type == "cpu":
        print(
            "Above 100 %: the data fit into a cache of the CPU, or the machine was busy when\n"
            "its limits were measured. --refresh measures them again."
        )


def _megabytes(num_bytes: int) -> str:
    value = num_bytes / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def rate_of(row: WayRow, flops: bool) -> float:
    """TFLOP/s, or GB/s of the least bytes to move."""
    assert row.timing is not None
    return row.flops / row.timing.median / 1e12 if flops else row.least_bytes / row.timing.median / 1e9


def _show_listing(listing: Listing, result: LessonResult) -> None:
    what = f"{result.gpu.name}, {dtype_name(listing.dtype)}, dim {listing.dim}"
    if listing.reading is None:
        print("\n" + textwrap.fill(f"Not compiled: {listing.way} for {what}: {listing.reason}", 80))
        return
    rows = [(line.instruction, f"{line.count}x", line.meaning) for line in explained(listing.reading)]
    print_table(
        ("PTX", "count", "what it means"),
        rows,
        ("PTX", "what it means"),
        f"\n{_TITLES[listing.way]} compiled for {what}",
    )
    for sentence in resources_in_words(listing.reading, result.gpu):
        print(textwrap.fill(sentence, 80))


def write_ptx(result: LessonResult, folder: Path) -> list[Path]:
    """Write <lesson>_<way>_<gpu>.ptx for every listing. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for x in result.listings:
        if x.ptx:
            written.append(folder / f"{result.lesson.name}_{x.way}_{result.gpu.name}.ptx")
            written[-1].write_text(x.ptx)
    return written


def plot(result: LessonResult, path: Path) -> None:
    """Draw the rate of every way over the sizes, and the limit.

    Raises:
        ValueError: matplotlib is not installed, or nothing was timed.
    """
    if not any(r.timing for r in result.rows):
        raise ValueError("plot: nothing was timed, so there is nothing to draw")
    flops = result.limits.matmul is not None
    figure = new_figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for way in WAYS:
        points = [(r.dim, rate_of(r, flops)) for r in result.rows if r.way == way and r.timing]
        if points:
            axes.plot(*zip(*points), marker="o", label=_TITLES[way])
    limit = result.limits.matmul / 1e12 if result.limits.matmul else result.limits.bandwidth / 1e9
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="limit, measured")
    label_powers(axes, sorted({r.dim for r in result.rows}))
    axes.set(
        xlabel="dim", ylabel="TFLOP/s" if flops else "GB/s of the least traffic", ylim=(0, None),
        title=f"{result.lesson.name}, {dtype_name(result.dtype)}, {result.limits.device}",
    )  # fmt: skip
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def new_figure(**options: Any) -> Any:
    """A matplotlib figure; a ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot: it needs matplotlib; pip install matplotlib") from None
    return Figure(**options)


def label_powers(axes: Any, numbers: list[int]) -> None:
    """A logarithmic x axis with ticks at these numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.minorticks_off()


def check_figure(path: Path) -> None:
    """Raise ValueError if no figure can be saved to this path."""
    known = new_figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"--plot {path}: expected a name that ends in .{', .'.join(sorted(known))}")
    if path.is_dir():
        raise ValueError(f"--plot {path}: it is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
