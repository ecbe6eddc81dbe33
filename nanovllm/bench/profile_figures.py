"""Figures of a profile, drawn with matplotlib: narrow, so that their text is readable on a phone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.job import ResultRow
from nanovllm.bench.profile import OpTime, Profile
from nanovllm.bench.result_tables import name_of

_WIDTH = 5.0  # inches; 390 pixels of a phone make 9 points about 10 pixels high
_TINY_SHARE = 0.015  # of a step; below it an op goes to "the rest"


def figures(profile: Profile, rows: Sequence[ResultRow] = ()) -> dict[str, Any]:
    """Name -> matplotlib figure: "roofline", "steps", "timeline", "memory", "comparison", those that there is data for.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    with matplotlib.rc_context(
        {"font.size": 9, "axes.titlesize": 10, "svg.fonttype": "none", "font.family": "sans-serif",
         "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "nanovllm"}
    ):  # fmt: skip
        colors = _Colors(profile)
        makers: dict[str, Callable[[], Any]] = {
            "roofline": lambda: _roofline(profile, colors),
            "steps": lambda: _steps(profile, colors),
            "timeline": lambda: _timeline(profile, colors),
            "memory": lambda: _memory(profile),
            "comparison": lambda: _comparison(rows),
        }
        made = {name: make() for name, make in makers.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def svg(figure: Any) -> str:
    """A figure as an <svg> element that scales with the page."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanovllm"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def write_pngs(made: dict[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"profile_{name}.png")
        figure.savefig(paths[-1], dpi=160, bbox_inches="tight")
    return paths


class _Colors:
    """One color for each op, in all figures."""

    def __init__(self, profile: Profile) -> None:
        from matplotlib import colormaps

        palette = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
        names = dict.fromkeys(op.op for op in profile.ops)
        self._of = {name: palette[i % len(palette)] for i, name in enumerate(names)}

    def __getitem__(self, op: str) -> Any:
        return self._of.get(op, "0.75")


def _figure(height: float, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False, **options)[:, 0]


def _roofline(profile: Profile, colors: _Colors) -> Any:
    """Each op a dot: flops a byte against flops a second, under the measured roof.

    An op that only moves bytes has no place on these axes. It is a hollow dot at the left edge, as high as if it did
    that edge's flops for each byte: as far below the roof as its bandwidth is.
    """
    dots = [o for o in profile.ops if o.bytes and o.device_us]
    matmul = profile.rates.matmul.get(profile.dtype)
    if not dots or not matmul:
        return None
    figure, (ax,) = _figure(4.2)
    ridge = matmul / profile.rates.bandwidth
    known = [o.flops / o.bytes for o in dots if o.flops]
    low, high = min([*known, ridge]) / 3, max([*known, ridge]) * 3
    x = [low * (high / low) ** (i / 100) for i in range(101)]
    ax.plot(x, [min(matmul, profile.rates.bandwidth * i) / 1e9 for i in x], color="0.2", lw=1.5)
    if fp8_matmul := profile.rates.matmul.get("float8"):
        ax.plot(x, [min(fp8_matmul, profile.rates.bandwidth * i) / 1e9 for i in x], color="0.6", lw=1, ls=":")
    if profile.rates.cache_bandwidth:
        ax.plot(x, [min(matmul, profile.rates.cache_bandwidth * i) / 1e9 for i in x], color="0.6", lw=1, ls="--")
    ax.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="GFLOP/s",
           title="Roofline, measured:"
                 f" {profile.rates.bandwidth / 1e9:,.0f} GB/s, {matmul / 1e12:,.3g} TFLOP/s")  # fmt: skip
    markers = {"prefill": "s", "mixed": "D", "decode": "o"}
    named = set()
    for o in dots:
        intensity = o.flops / o.bytes or low
        look = {"mec": "white", "mew": 0.5} if o.flops else {"mfc": "none", "mew": 1.5, "clip_on": False}
        ax.plot(intensity, o.bytes * intensity / o.device_us / 1e3, markers[o.phase], color=colors[o.op], ms=6,
                label=None if o.op in named else o.op, **look)  # fmt: skip
        named.add(o.op)
    ax.set_xlim(low, high)
    for phase in profile.phases():
        ax.plot([], [], markers[phase], color="0.5", label=phase)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _grouped(ops: Sequence[OpTime]) -> list[tuple[str, float]]:
    """(op, share) of a step, largest first, what is tiny put together."""
    total = sum(o.device_us for o in ops) or 1.0
    by_op: dict[str, float] = {}
    for o in ops:
        by_op[o.op] = by_op.get(o.op, 0.0) + o.device_us / total
    large = {op: share for op, share in by_op.items() if share >= _TINY_SHARE}
    rest = 1 - sum(large.values())
    pairs = sorted(large.items(), key=lambda item: -item[1])
    return [*pairs, ("the rest", rest)] if rest > 1e-6 else pairs


def _steps(profile: Profile, colors: _Colors) -> Any:
    """A bar for each kind of step: the ops' shares of its device time."""
    phases = profile.phases()
    if not phases:
        return None
    groups = {phase: _grouped([o for o in profile.ops if o.phase == phase]) for phase in phases}
    figure, (ax,) = _figure(1.4 + 0.45 * len(phases) + 0.16 * len({op for g in groups.values() for op, _ in g}) / 3)
    named = set()
    for y, group in enumerate(groups.values()):
        left = 0.0
        for op, share in group:
            label = None if op in named else op
            ax.barh(y, share * 100, left=left * 100, color=colors[op], edgecolor="white", lw=0.5, label=label)
            if share > 0.07:
                ax.text((left + share / 2) * 100, y, f"{share:.0%}", ha="center", va="center", fontsize=8)
            named.add(op)
            left += share
    ax.set(yticks=range(len(groups)), yticklabels=list(groups))
    ax.set(xlabel="% of the step's device time", title="Where a step goes")
    ax.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _timeline(profile: Profile, colors: _Colors) -> Any:
    """One step of each kind, from its first kernel to its last."""
    phases = [p for p in profile.phases() if profile.timeline.get(p)]
    if not phases:
        return None
    figure, axes = _figure(0.5 + 1.05 * len(phases), len(phases))
    for ax, phase in zip(axes, phases):
        spans: dict[str, list[tuple[float, float]]] = {}
        for op, start, duration in profile.timeline[phase]:
            spans.setdefault(op, []).append((start / 1e3, duration / 1e3))
        for op, segments in spans.items():
            # A step has thousands of short kernels: one after the other of the same op are drawn as one.
            ax.broken_barh(_joined(segments), (0, 1), color=colors[op], lw=0)
        ax.set(yticks=[], xlabel="ms", title=f"One {phase} step")
        ax.margins(x=0)
    return figure


def _joined(segments: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, duration in sorted(segments):
        if joined and start <= sum(joined[-1]) * (1 + 1e-9):
            joined[-1] = (joined[-1][0], max(sum(joined[-1]), start + duration) - joined[-1][0])
        else:
            joined.append((start, duration))
    return joined


def _memory(profile: Profile) -> Any:
    names = [n for n in ("reserved", "allocated", "resident") if any(n in m for m in profile.memory)]
    if not names:
        return None
    figure, (ax,) = _figure(2.0)
    steps = range(1, len(profile.memory) + 1)
    for name in names:
        sizes = [m.get(name, math.nan) / 2**30 for m in profile.memory]
        ax.plot(steps, sizes, drawstyle="steps-post", label=name)
    ax.set(xlabel="recorded step", ylabel="GiB", title="Memory", ylim=(0, None))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=8)
    return figure


def _comparison(rows: Sequence[ResultRow]) -> Any:
    """Output tokens a second of every configuration, by workload, if there is more than one."""
    rows = [r for r in rows if r.error is None and r.repeats]
    configurations = list(dict.fromkeys(name_of(r) for r in rows))
    if len(configurations) < 2:
        return None
    workloads = list(dict.fromkeys(r.workload for r in rows))
    figure, axes = _figure(0.6 + 0.28 * len(rows) + 0.6 * len(workloads), len(workloads))
    for ax, workload in zip(axes, workloads):
        own = [r for r in rows if r.workload == workload]
        rates = [r.median("output_rate") or 0.0 for r in own]
        bars = ax.barh(range(len(own)), rates, color=["#1f77b4" if r.engine == "nanovllm" else "#ff7f0e" for r in own])
        ax.bar_label(bars, [f"{r:,.0f}" for r in rates], padding=2, fontsize=8)
        ax.set(yticks=range(len(own)), yticklabels=[name_of(r) for r in own], title=f"{workload}, output tokens/s")
        ax.margins(x=0.15)
        ax.invert_yaxis()
    return figure
