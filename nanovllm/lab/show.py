"""A lesson's result as tables and sentences, and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm.lab.lesson import WAYS, dtype_name
from nanovllm.lab.ptx import explained, resources_in_words
from nanovllm.lab.run import Listing, Result
from nanovllm.lab.timing import Row

_TITLES = {
    "plain": "PyTorch, written out", "torch": "PyTorch's own", "compile": "torch.compile", "cuda": "CUDA C++",
    "triton": "Triton",
}  # fmt: skip


def show(result: Result, console: Any) -> None:
    """Print a result to a rich console."""
    lesson, limit = result.lesson, result.limits
    dtype = dtype_name(result.dtype)
    roof = f"{limit.bandwidth / 1e9:,.0f} GB/s"
    if limit.matmul:
        roof += f", {limit.matmul / 1e12:,.2f} TFLOP/s in {dtype}"
    _say(console, f"{lesson.name}: {lesson.formula}")
    _say(console, f"{dtype} on {limit.device}; its limits, measured: {roof}. Inputs of seed {result.seed}.")
    print_table(console, "Is it right? Against float64, at odd sizes", _checks(result))
    for line in result.wrong:
        _say(console, line, style="red")
    title = "How fast? Square inputs, medians" + (", L2 cold" if result.device.type == "cuda" else "")
    print_table(console, title, _timings(result))
    if any((r.share or 0) > 1 for r in result.rows) and result.device.type == "cpu":
        _say(
            console, "Above 100 %: the data fit into a cache of the CPU, or the machine was busy when its limits were "
            "measured (--refresh measures them again).",
        )  # fmt: skip
    kernels = _kernels(result)
    if kernels.row_count:
        print_table(console, "What ran? One call under the profiler", kernels)
    for listing in result.listings:
        _show_listing(listing, result, console)


def _checks(result: Result) -> Any:
    table = table_of("way", "what", "cases", "worst error / tolerance", "verdict")
    for c in result.checks:
        if c.reason is not None:
            table.add_row(c.way, _TITLES[c.way], "", "", _escaped(c.reason))
            continue
        verdict = f"[red]{len(c.failures)} wrong[/]" if c.failures else "right" if c.cases else "nothing to compare"
        table.add_row(c.way, _TITLES[c.way], str(c.cases), f"{c.error:.2f}", verdict + (f" ({c.how})" if c.how else ""))
    return table


def _timings(result: Result) -> Any:
    flops = result.limits.matmul is not None
    rate = "TFLOP/s" if flops else "GB/s"
    table = table_of("dim", "way", "us", "p20-p80", "MB least", "MB moved", rate, "of limit", "kernels", "")
    dim, never = None, {w.way for w in result.rows} - {r.way for r in result.rows if r.timing}
    for r in result.rows:
        if r.way in never and r.dim != result.rows[-1].dim:
            continue  # say the reason once
        if dim not in (None, r.dim):
            table.add_section()
        dim = r.dim
        if r.timing is None:
            table.add_row(str(r.dim), r.way, *[""] * 7, _escaped(r.reason or ""))
            continue
        t = r.timing
        table.add_row(
            str(r.dim), r.way, f"{1e6 * t.median:,.1f}", f"{1e6 * t.p20:,.1f}-{1e6 * t.p80:,.1f}",
            _megabytes(r.least_bytes), _megabytes(r.bytes) + ("" if r.counted else " *"),
            f"{rate_of(r, flops):,.2f}" if flops else f"{rate_of(r, flops):,.0f}", f"{r.share:.0%}",
            str(sum(k.count for k in r.ran)),
        )  # fmt: skip
    rate = "" if flops else "GB/s: the least that must be moved, over the time, so that ways compare. "
    table.caption = f"{rate}MB moved: all reads and writes of PyTorch's operations; *: the least, since not counted."
    return table


def _megabytes(num_bytes: int) -> str:
    value = num_bytes / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def rate_of(row: Row, flops: bool) -> float:
    """TFLOP/s, or GB/s of the least bytes to move."""
    assert row.timing is not None
    return row.flops / row.timing.median / 1e12 if flops else row.least_bytes / row.timing.median / 1e9


def _kernels(result: Result) -> Any:
    """What ran at the largest size at which each way was timed."""
    what = "kernel" if result.device.type == "cuda" else "operator"
    table = table_of("way", "dim", what, "times", "us")
    for way, row in {r.way: r for r in result.rows if r.ran}.items():
        for i, k in enumerate(sorted(row.ran, key=lambda k: -k.seconds)[:8]):
            first = (way, str(row.dim)) if i == 0 else ("", "")
            table.add_row(*first, k.name[:110], str(k.count), f"{1e6 * k.seconds:,.1f}")
    return table


def _show_listing(listing: Listing, result: Result, console: Any) -> None:
    title = f"{_TITLES[listing.way]} compiled for {result.gpu.name}, {dtype_name(listing.dtype)}, dim {listing.dim}"
    if listing.reading is None:
        _say(console, f"{title}: {listing.reason}")
        return
    table = table_of("PTX", "written", "what it means")
    for line in explained(listing.reading):
        table.add_row(_escaped(line.instruction), f"{line.count}x", line.meaning)
    print_table(console, title, table)
    for sentence in resources_in_words(listing.reading, result.gpu):
        _say(console, sentence)


def _say(console: Any, line: str, **style: Any) -> None:
    console.print(line, highlight=False, markup=False, **style)


def write_ptx(result: Result, folder: Path) -> list[Path]:
    """Write <lesson>_<way>_<gpu>.ptx for every listing. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for x in result.listings:
        if x.ptx:
            written.append(folder / f"{result.lesson.name}_{x.way}_{result.gpu.name}.ptx")
            written[-1].write_text(x.ptx)
    return written


def plot(result: Result, path: Path) -> None:
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


def table_of(*columns: str) -> Any:
    """A rich table with columns of numbers aligned to the right."""
    from rich.table import Table

    table = Table(caption_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    return table


def print_table(console: Any, title: str, table: Any) -> None:
    """Print a title, which rich would break to the width of the table, and the table under it."""
    _say(console, f"\n{title}", style="bold")
    console.print(table)


_NUMBERS = {
    "dim", "us", "ms", "p20-p80", "MB least", "MB moved", "GB/s", "TFLOP/s", "of limit", "kernels", "times", "cases",
    "written", "time", "flops", "share", "steps", "layers", "batch",
}  # fmt: skip


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
