"""Draw the pictures of the docs: `make pictures`.

The speed chart and the roofline show kept results, results/nvidia-h200/. The other two show how the engine works.
Each picture is an SVG file beside this one.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "results" / "nvidia-h200"
ENGINES = {"nanovllm": "nanovllm", "vllm": "vLLM", "sglang": "SGLang"}
WORKLOADS = ("bs1", "bs8", "bs32", "bs128", "std256")
OURS, PEER, THIRD, GREY = "#2a9d8f", "#8d99ae", "#e76f51", "#495057"

matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "nanovllm", "font.family": "sans-serif", "font.size": 10}
)


def newest_run(model: str) -> tuple[str, dict[tuple[str, str], dict[str, Any]]]:
    """(date, (workload, engine) -> row) of the newest kept run in which all of `ENGINES` ran all of `WORKLOADS`."""
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for workload in WORKLOADS:
        for run in json.loads((RESULTS / f"{workload}.json").read_text()):
            for row in run["rows"]:
                usual = row["variant"] in ("", "custom") and not run["arguments"].get("kv_cache_dtype")
                if usual and (row["model"], row["workload"]) == (model, workload) and row["engine"] in ENGINES:
                    found.setdefault(run["date"], {})[workload, row["engine"]] = row
    newest = max(date for date, rows in found.items() if len(rows) == len(WORKLOADS) * len(ENGINES))
    return newest, found[newest]


def median_rate(row: dict[str, Any]) -> float:
    """Output tokens per second, the median of a row's repeats."""
    return statistics.median(repeat["output_tokens"] / repeat["seconds"] for repeat in row["repeats"])


def speed() -> Figure:
    """The engines of README's table, each over vLLM."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    date, rows = newest_run("qwen3-0.6b")
    for place, (engine, colour) in enumerate(zip(ENGINES, (OURS, PEER, THIRD))):
        version = rows[WORKLOADS[0], engine]["about"]["version"]
        label = ENGINES[engine] + (f" {version}" if place else "")
        for i, workload in enumerate(WORKLOADS):
            rate, base = (median_rate(rows[workload, name]) for name in (engine, "vllm"))
            x = i + 0.27 * (place - 1)
            axes.bar(x, rate / base, 0.25, color=colour, label=label if i == 0 else None)
            axes.text(x, rate / base + 0.03, f"{rate:,.0f}", ha="center", fontsize=7)
    axes.set_xticks(range(len(WORKLOADS)), WORKLOADS)
    axes.set_ylabel("speed relative to vLLM")
    axes.set_title(f"Qwen3-0.6B on one H200, output tokens per second (one run, {date[:10]})")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def roofline() -> Figure:
    """Every case of `nanovllm kernels bench` that was kept: FLOPs per byte against TFLOP/s."""
    kept = json.loads((RESULTS / "kernels" / "all.json").read_text())
    rates = json.loads((RESULTS / "std256.json").read_text())[-1]["rates"]
    bandwidth, compute = kept["copy_bytes_per_second"], rates["matmul"]["bfloat16"]
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for provider, colour in (("native", PEER), ("triton", OURS)):
        points = [
            (m["flops"] / m["bytes"], m["flops"] / m["us"] / 1e6)
            for m in kept["measurements"]
            if m["provider"] == provider and m.get("us") and m["flops"] and m["bytes"] >= 2**23
        ]
        label = "Triton kernel" if provider == "triton" else "PyTorch reference"
        axes.scatter(*zip(*points), s=18, color=colour, alpha=0.8, label=label)
    low, ridge, high = 0.05, compute / bandwidth, 5000.0
    axes.plot([low, ridge, high], [low * bandwidth / 1e12, compute / 1e12, compute / 1e12], color=GREY)
    axes.text(0.12, 0.04, f"slope: copy {bandwidth / 1e12:.2f} TB/s", color=GREY, fontsize=9)
    axes.text(
        high, compute / 1e12 * 1.15, f"bf16 products {compute / 1e12:.0f} TFLOP/s", ha="right", color=GREY, fontsize=9
    )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.02, 2500))
    axes.set(xlabel="FLOPs per byte of device memory", ylabel="TFLOP/s")
    axes.set_title(f"Ops of 8 MiB and more on one {kept['device']} ({kept['command']}, {kept['date']})")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _box(axes: Any, x: float, y: float, width: float, text: str, sub: str = "", colour: str = OURS) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, 0.8, boxstyle="round,pad=0,rounding_size=0.08", fc=colour, ec="none", alpha=0.9)
    )
    axes.text(x + width / 2, y + (0.53 if sub else 0.4), text, ha="center", va="center", color="white", weight="bold")
    if sub:
        axes.text(x + width / 2, y + 0.23, sub, ha="center", va="center", color="white", fontsize=8)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=GREY, connectionstyle=style))


def token_path() -> Figure:
    """The five parts of a step, and which data stay on the device."""
    figure, axes = _canvas(9, 3.4)
    steps = (
        ("schedule", "Scheduler", PEER), ("batch", "Batch", PEER), ("run", "ModelRunner", OURS),
        ("sample", "Sampler", OURS), ("update", "Scheduler", PEER),
    )  # fmt: skip
    for i, (name, where, colour) in enumerate(steps):
        _box(axes, 0.2 + 1.78 * i, 1.5, 1.4, name, where, colour)
        if i:
            _arrow(axes, (0.2 + 1.78 * i - 0.36, 1.9), (0.2 + 1.78 * i - 0.02, 1.9))
    _arrow(axes, (6.3, 1.46), (4.5, 1.46), -0.5)
    axes.text(5.4, 0.72, "sampled ids stay on the device\nand feed the next step", ha="center", fontsize=9, color=GREY)
    _arrow(axes, (8.0, 2.34), (0.9, 2.34), 0.14)
    axes.text(4.5, 3.0, "a copy reaches the host one step later", ha="center", fontsize=9, color=GREY)
    for x, text, colour in ((0.3, "host", PEER), (1.4, "GPU", OURS)):
        axes.add_patch(Rectangle((x, 0.25), 0.22, 0.22, color=colour))
        axes.text(x + 0.3, 0.36, text, va="center", fontsize=9)
    return figure


def paged_cache() -> Figure:
    """Two sequences that share their first block."""
    figure, axes = _canvas(9, 3.6)
    owners = {0: ("A, B", THIRD), 2: ("A", OURS), 5: ("B", PEER), 6: ("A", OURS)}
    for block in range(8):
        owner, colour = owners.get(block, ("free", "#dee2e6"))
        axes.add_patch(Rectangle((0.3 + 1.06 * block, 0.55), 0.96, 0.7, fc=colour, ec="white"))
        axes.text(0.78 + 1.06 * block, 0.9, f"block {block}\n{owner}", ha="center", va="center", fontsize=8,
                  color="black" if owner == "free" else "white")  # fmt: skip
    axes.text(
        0.3, 0.25, "KV cache of one layer: every block holds the keys and values of block_size tokens", fontsize=9
    )
    for y, name, table, colour in ((2.85, "sequence A", (0, 2, 6), OURS), (1.95, "sequence B", (0, 5), PEER)):
        axes.text(0.3, y + 0.2, f"{name}\nblock table", va="center", fontsize=9)
        for i, block in enumerate(table):
            x = 1.7 + 0.62 * i
            shared = THIRD if block == 0 else colour
            axes.add_patch(Rectangle((x, y), 0.55, 0.42, fc="white", ec=shared, lw=1.6, zorder=3))
            axes.text(x + 0.275, y + 0.21, str(block), ha="center", va="center", fontsize=9, zorder=4)
            axes.plot([x + 0.275, 0.78 + 1.06 * block], [y, 1.27], color=shared, lw=1, alpha=0.7)
    axes.text(5.2, 3.1, "kv_slot = block * block_size + offset", fontsize=10, family="monospace", color=GREY)
    axes.text(5.2, 2.7, "Block 0 holds the prefix that A and B share.\nIt is stored once and read by both.",
              fontsize=9, color=GREY, va="top")  # fmt: skip
    return figure


PICTURES = {"speed": speed, "roofline": roofline, "token-path": token_path, "paged-cache": paged_cache}


def main(directory: Path = HERE) -> None:
    """Write every picture into a directory."""
    for name, draw in PICTURES.items():
        draw().savefig(directory / f"{name}.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
