"""The table of docs/log/planner.md, from the JSON files that the proof writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.result_tables import write_between_markers

BEGIN, END = "<!-- planner:begin -->", "<!-- planner:end -->"
NOT_MEASURED = "Not measured yet."


def markdown(documents: Sequence[dict[str, Any]]) -> str:
    """A summary and a row for every shape, for each GPU; `NOT_MEASURED` without any."""
    if not documents:
        return NOT_MEASURED
    return "\n\n".join(_one(d) for d in documents)


def _one(d: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in d["versions"].items())
    how = (
        "every configuration that the planner keeps, and the built-in one"
        if not d["most"]
        else f"at most {d['most']} configurations of a shape"
    )
    lines = [
        f"**{d['gpu']}**, {versions}, {d['date']}; {how}.", "",
        "| kind | shapes | configurations timed | first choice, of the best: median | worst "
        "| best planned among the first five, within 1 % | best of all so "
        "| best of the first five, of the best: median "
        "| error of the predicted time, median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, s in d["summary"].items():
        lines.append(
            f"| {kind} | {s['shapes']} | {s['timed']:,} | {s['median_share']:.0%} | {s['worst_share']:.0%} "
            f"| {s['best_in_first_five']:.0%} | {s['best_of_all_in_first_five']:.0%} "
            f"| {s['first_five_median_share']:.0%} | {s['median_prediction_error']:.0%} |"
        )
    lines += [
        "",
        "| shape | first choice | predicted, us | measured, us | best | us | its rank "
        "| first within 1 % of the best planned | first choice, of the best | built in, us | PyTorch, us |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for s in d["shapes"]:
        first, best, own, library = s["first"], s["best"], s.get("builtin"), s.get("library_us")
        lines.append(
            f"| {words(s['problem'])} | {first['config']} | {first['predicted_us']:.1f} | {first['us']:.1f} "
            f"| {best['config']} | {best['us']:.1f} | {_rank(best['rank'], s['candidates'])} | {s['near_rank'] + 1} "
            f"| {s['share']:.0%} | {_us(own and own['us'])} "
            f"| {_us(library)} |"
        )
    failed = sum(len(s.get("failed", ())) for s in d["shapes"])
    wrong = sum(len(s.get("wrong", ())) for s in d["shapes"])
    lines += [
        "",
        f"{failed} configurations did not compile or launch; {wrong} of those compared with the reference were wrong, "
        "and do not count.",
    ]
    if d.get("stopped"):
        lines.append(f"The run stopped early: {d['stopped']}.")
    if d.get("errors"):
        lines.append(
            "Could not be tried: " + "; ".join(f"{words(e['problem'])} ({e['reason']})" for e in d["errors"]) + "."
        )
    if d["not_measured"]:
        lines.append(f"Not reached within the time limit: {'; '.join(words(p) for p in d['not_measured'])}.")
    return "\n".join(lines)


def _us(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:.1f}"


def _rank(rank: int, kept: int) -> str:
    return f"{rank + 1} of {kept}" if rank < kept else "built in, not kept"


def words(problem: dict[str, Any]) -> str:
    """A problem in few words."""
    p = problem
    if p["problem"] == "GemmProblem":
        return f"gemm {p['m']} x {p['n']} x {p['k']} {p['dtype']}"
    if p["problem"] == "AttentionProblem":
        heads = f"{p['heads']}/{p['kv_heads']} x {p['head_dim']}"
        return f"attention {p['batch']} x {p['query']} of {p['context']}, {heads} {p['dtype']}"
    if p["problem"] == "ElementwiseProblem":
        return f"elementwise {p['elements']:,} x {p['inputs']} {p['dtype']}"
    return f"{p['kind']} {p['rows']} x {p['size']} {p['dtype']}"


def fill(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """Replace what stands between the markers of a Markdown file; a ValueError if it has none."""
    write_between_markers(path, markdown(documents) + "\n", BEGIN, END)
