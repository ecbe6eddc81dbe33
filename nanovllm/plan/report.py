"""Plans as rows of a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.resources import Plan

COLUMNS = {
    "#": "rank by predicted time",
    "configuration": "tiles, w: warps, s: stages",
    "I": "flops a byte that is loaded",
    "shared": "KiB of shared memory a block",
    "regs": "registers a thread",
    "S_min": "stages that cover the latency",
    "in flight": "KiB under way on a multiprocessor / KiB that cover the latency",
    "blocks/SM": "resident at a time, and what allows no more",
    "occ": "resident warps, as a share of the most",
    "waves": "of blocks, and how evenly multiprocessors share them: the mean number over the largest",
    "us": "predicted, cold L2 cache, in a CUDA graph",
    "of limit": "the least time for the arithmetic or for every byte once / predicted time",
    "binds": "the part that takes longest",
}


def floor_seconds(plan: Plan, rate: float, least_bytes: float, device: DeviceModel) -> float:
    """The least time: all the arithmetic, or every byte through device memory once."""
    return max(plan.flops / rate, least_bytes / device.bandwidth)


def table_rows(plans: Sequence[Plan], floor: float) -> tuple[list[str], list[list[str]]]:
    """(columns, rows). `in flight` stands where there are no stages."""
    streaming = bool(plans) and plans[0].needed > 0
    columns = [c for c in COLUMNS if c != ("S_min" if streaming else "in flight")]
    rows = []
    for rank, p in enumerate(plans, 1):
        covered = f"{p.in_flight / 1024:.0f}/{p.needed / 1024:.0f}" if streaming else str(p.min_stages)
        rows.append(
            [
                str(rank), str(p.config), f"{p.intensity:.1f}", f"{p.shared / 1024:.1f}", str(p.registers), covered,
                f"{p.occupancy.blocks} ({p.occupancy.limit})", f"{p.occupancy.warps:.0%}",
                f"{p.waves.count:.2f} ({p.waves.efficiency:.0%})", f"{1e6 * p.seconds:.2f}", f"{floor / p.seconds:.0%}",
                p.limit,
            ]
        )  # fmt: skip
    return columns, rows


def document(
    kind: str, problem: Any, device: DeviceModel, plans: Sequence[Plan], count: int, floor: float
) -> dict[str, Any]:
    """What `--json` prints: the problem, the device by name, and the plans, in bytes, flops and seconds."""
    found = {
        "kind": kind, "problem": asdict(problem), "gpu": device.name, "measured": list(device.measured),
        "floor_seconds": floor, "memory_bytes": device.memory, "candidates": count,
        "plans": [p.as_dict() for p in plans],
    }  # fmt: skip
    return finite(found)


def finite(value: Any) -> Any:
    """The value with None for what JSON cannot say: infinity and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def compiled(plans: Sequence[Plan], compile: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """For each plan the shared bytes, registers and spilled bytes as compiled; or "error", why it does not compile."""
    found = []
    for p in plans:
        try:
            found.append(asdict(compile(p.config)))
        except RuntimeError as e:
            found.append({"error": str(e).splitlines()[0]})
    return found


def compiled_cells(c: dict[str, Any]) -> list[str]:
    """Two cells of a table: shared KiB; registers and spills, or the error."""
    if "error" in c:
        return ["", c["error"][:60]]
    return [f"{c['shared'] / 1024:.1f}", f"{c['registers']}" + (f", {c['spilled']} B spilled" if c["spilled"] else "")]
