"""A profile as text, and as one HTML page that needs nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanovllm.bench import result_tables
from nanovllm.bench.job import ResultRow
from nanovllm.bench.profile import Profile, StepTime, host_times
from nanovllm.bench.profile_figures import svg
from nanovllm.bench.result_tables import percent

OPS_HEAD = (
    "step", "op", "provider", "calls", "us a step", "early us", "share of step", "host us", "GB/s", "TFLOP/s",
    "of limit",
)  # fmt: skip


def op_table(profile: Profile, count: int | None = None) -> list[list[str]]:
    """`OPS_HEAD`, and the ops with the most device time; where nothing ran early, as on a CPU, without that column."""
    totals: dict[str, float] = defaultdict(float)
    for o in profile.ops:
        totals[o.phase] += o.device_us
    rows = [list(OPS_HEAD)]
    for o in profile.ops[:count]:
        rows.append([
            o.phase, o.label, o.provider, f"{o.calls:g}", f"{o.device_us:,.1f}",
            f"{o.early_us:,.1f}" if o.early_us else "-",
            percent(o.device_us / totals[o.phase]), "-" if o.host_us is None else f"{o.host_us:,.0f}",
            _rate(o.bytes, o.device_us, 1e3), _rate(o.flops, o.device_us, 1e6), percent(o.share),
        ])  # fmt: skip
    if not any(o.early_us for o in profile.ops):
        for row in rows:
            del row[OPS_HEAD.index("early us")]
    return rows


def _rate(amount: float, us: float, unit: float) -> str:
    """Three digits of `amount` over `us`; `unit` is in amounts a microsecond."""
    if not amount or not us:
        return "-"
    rate = amount / us / unit
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def step_words(s: StepTime, profile: Profile) -> str:
    """A sentence or two on one kind of step."""
    text = f"{s.phase}: {s.what}; {s.wall_us / 1e3:,.3f} ms a step over {s.count}"
    if s.idle is not None:
        text += f", {s.kernels:,.0f} kernels in {s.device_us / 1e3:,.3f} ms of it, the GPU idle {s.idle:.1%}"
        if s.gaps_us is not None and s.gap_p50_us is not None:
            text += f"; gaps between kernels {s.gap_p50_us:.2f} us (p99 {s.gap_p99_us:.2f}), {s.gaps_us:,.0f} us a step"
    if s.phase == "decode" and profile.unprofiled_us is not None:
        text += f"; {profile.unprofiled_us / 1e3:,.3f} ms without the profiler"
    return text


def facts(profile: Profile) -> list[str]:
    r = profile.rates
    called = {o.op for o in profile.ops}
    chosen = {op: p for op, p in profile.about.get("kernels", {}).items() if op in called and p != "native"}
    kernels = ", ".join(f"{op}={p}" for op, p in sorted(chosen.items())) or "native everywhere"
    lines = [
        f"{profile.model}, {profile.about['device']}, {profile.dtype}; workload {profile.workload}: {profile.load}",
        f"measured here: {r.bandwidth / 1e9:,.0f} GB/s (read {r.read / 1e9:,.0f}, copy {r.copy / 1e9:,.0f}), "
        + ", ".join(f"{v / 1e12:,.3g} TFLOP/s {k}" for k, v in sorted(r.matmul.items())),
        f"kernels: {kernels}",
    ]
    if r.cache_bandwidth:
        lines.append(
            f"L2 cache: {r.cache_bytes / 2**20:.0f} MiB at {r.cache_bandwidth / 1e9:,.0f} GB/s;"
            f" an empty kernel in a graph: {1e6 * r.kernel_seconds:.2f} us"
        )
    if profile.named_from_eager:
        lines.append(
            "Times are of the engine as it runs; kernels inside CUDA graphs have their names from a second run"
            " without graphs."
        )
    if any(o.early_us for o in profile.ops):
        lines.append(
            "A kernel's time begins when every kernel before it has ended, so all times add up to the time in which "
            'the GPU works. A kernel that is launched earlier waits until then, or reads weights: this is "early us", '
            "which lies in the time of the ops before it."
        )
    if early := [f"{o.phase} {o.label} {o.read_early_us:.1f} us" for o in profile.ops if o.read_early_us]:
        lines.append(
            "Some ops read much of their data early, so their own time is below the limit. They are shown at 100 %, "
            f"with the missing time taken from the ops before them: {', '.join(early)}."
        )
    return lines


def over_limit(profile: Profile) -> list[str]:
    """Ops that seem faster than the hardware: there the account is wrong."""
    return [
        f"{o.phase} {o.label}: {percent(o.share)} of the limit"
        for o in profile.ops
        if o.share is not None and o.share > 1
    ]


def memory_words(profile: Profile) -> list[str]:
    lines = []
    for name in ("allocated", "reserved", "resident"):
        values = [m[name] for m in profile.memory if name in m]
        if values:
            lines.append(f"{name}: {min(values) / 2**30:,.2f} to {max(values) / 2**30:,.2f} GiB")
    blocks = [m for m in profile.memory if "kv_blocks" in m]
    if blocks:
        lines.append(
            f"KV cache: {' '.join(str(m['kv_blocks_used']) for m in blocks)} of {blocks[-1]['kv_blocks']} blocks in use"
            " after each recorded step"
        )
    return lines


# --------------------------------------------------------------------------------------------------------- sections


@dataclass(frozen=True)
class Table:
    """Cells in columns. `text`: the names of the columns of words, which align to the left."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: tuple[str, ...]


@dataclass(frozen=True)
class ReportSection:
    """A part of a report: sentences, then drawings by name with what is said of them (the page alone), then a table."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None
    drawings: Mapping[str, str] | None = None
    wrong: bool = False


_DRAWN = {
    "steps": "",
    "roofline": "Each dot is an op; the line is what this device was measured to reach, dashed from the L2 cache. "
    "Hollow: ops without arithmetic, at the left edge, as far below the line as their bandwidth is.",
    "timeline": "Colours as above.",
}
_FLAME = {"flame": "Width is time over the recorded steps; what is called lies below its caller."}


def sections(profile: Profile, rows: Sequence[ResultRow] = ()) -> list[ReportSection]:
    """Everything that a report has, in order. rows: of the timed runs."""
    found = [
        ReportSection("", facts(profile)),
        ReportSection("Steps", [step_words(s, profile) for s in profile.steps], drawings=_DRAWN),
    ]
    if wrong := over_limit(profile):
        found.append(ReportSection("Above the limit: the account of these is wrong", wrong, wrong=True))
    head, *ops = op_table(profile, 40)
    found.append(ReportSection("Ops, most device time first", table=Table(head, ops, OPS_HEAD[:3])))
    if profile.kernels:
        cells = [[k.phase, k.op, f"{k.calls:g}", f"{k.us:,.1f}", k.name[:90]] for k in profile.kernels[:25]]
        kernels = Table(("step", "op", "calls", "us a step", "kernel"), cells, ("step", "op", "kernel"))
        found.append(ReportSection("Kernels", table=kernels))
    host = [(f"{us / 1e3:,.2f}", name) for name, us in host_times(profile)]
    own = Table(("ms", "name"), host, ("name",))
    found.append(ReportSection("Host, own time over the recorded steps", table=own, drawings=_FLAME))
    found.append(ReportSection("Memory", memory_words(profile), drawings={"memory": ""}))
    if rows:
        cells = [result_tables.row_cells(r) for r in rows if r.error is None]
        timed = Table(result_tables.HEAD, cells, result_tables.HEAD[:2])
        lines = [*result_tables.comparison_lines(rows), *result_tables.error_lines(rows)]
        found.append(ReportSection("Throughput", lines, timed, {"comparison": ""}))
    return found


def text_report(profile: Profile, rows: Sequence[ResultRow] = ()) -> str:
    """The whole profile as plain text."""
    parts = []
    for section in sections(profile, rows):
        lines = [section.title.upper()] if section.title else []
        lines += section.lines
        lines += _aligned(section.table) if section.table else []
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _aligned(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows)]
    return [
        "  ".join(f"{c:{'<' if n in table.text else '>'}{w}}" for c, n, w in zip(row, table.head, widths)).rstrip()
        for row in (table.head, *table.rows)
    ]


# ----------------------------------------------------------------------------------------------------------------- HTML

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 12px; max-width: 860px; }
body { color: #1b1b1b; background: #fff; }
h1 { font-size: 1.35em; margin: .3em 0; } h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
svg { width: 100%; height: auto; max-width: 640px; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
th, td { padding: 3px 8px; border-bottom: 1px solid #ddd; text-align: right; } th { background: #f4f4f4; }
td.t, th.t { text-align: left; } .warn { color: #a40000; } .small { font-size: 13px; color: #555; }
.flame { font-size: 11px; } .flame div.row { display: flex; } .flame div.box { box-sizing: border-box; min-width: 0; }
.flame span { display: block; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; padding: 1px 3px; }
.flame span { border: 1px solid #fff; border-radius: 2px; height: 17px; }
"""
_NARROWEST = 0.004  # of the flame graph's width


def html_report(profile: Profile, figures: dict[str, Any], rows: Sequence[ResultRow] = ()) -> str:
    """One page with everything inside it: no script, no request.

    Args:
        figures: the figures of `profile_figures.figures`.
    """
    title = f"{profile.model} on {profile.about['device']}: {profile.workload}"
    drawn = {name: svg(figure) for name, figure in figures.items()} | {"flame": _flame(profile.flame)}
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections(profile, rows):
        body += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        body += [f"<p{' class=warn' if section.wrong else ''}>{escape(line)}</p>" for line in section.lines]
        for name, words in (section.drawings or {}).items():
            if name in drawn:
                kind = "flame" if name == "flame" else "figure"
                body.append(f'<div class="{kind}" id="{name}">{drawn[name]}</div><p class="small">{words}</p>')
        body += [_table(section.table)] if section.table else []
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        left = [" class=t" if name in table.text else "" for name in table.head]
        return f"<tr>{''.join(f'<{tag}{c}>{escape(cell)}</{tag}>' for cell, c in zip(cells, left))}</tr>"

    rows = "".join(line(row, "td") for row in table.rows)
    return f'<div class="scroll"><table>{line(table.head, "th")}{rows}</table></div>'


def _flame(node: dict[str, Any], total: float | None = None) -> str:
    """Boxes within boxes: each has its name above those it calls."""
    total = total or node.get("us") or 1.0
    if not node or node["us"] / total < _NARROWEST:
        return ""
    words = f"{node['name']}: {node['us'] / 1e3:,.2f} ms"
    hue = 20 + sum(map(ord, node["name"])) % 40
    inner = "".join(
        f'<div class="box" style="width:{100 * child["us"] / node["us"]:.3f}%">{_flame(child, total)}</div>'
        for child in node["children"]
        if child["us"] / total >= _NARROWEST
    )
    return f'<span title="{escape(words)}" style="background:hsl({hue},85%,72%)">{escape(words)}</span>' + (
        f'<div class="row">{inner}</div>' if inner else ""
    )
