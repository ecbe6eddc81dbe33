"""Plans as rows of a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.resources import Plan


def table_rows(
    plans: Sequence[Plan], floor: float, compiled: Sequence[dict[str, Any]] | None = None, wide: bool = False
) -> tuple[list[str], list[list[str]], list[str]]:
    """(columns, rows, notes below the table). docs/planner.md explains the columns.

    Args:
        floor: the least seconds: all the arithmetic, or every byte through device memory once.
        compiled: what `compiled` found for each plan; three columns show it.
        wide: also the columns that say why: intensity, stages or bytes in flight, occupancy, efficiency of the waves.
    """
    rows, notes = [], []
    for rank, p in enumerate(plans, 1):
        cells = {
            "#": str(rank), "configuration": str(p.config), "us": f"{1e6 * p.seconds:.2f}",
            "of\nlimit": f"{floor / p.seconds:.0%}", "bound by": p.limit, "shared\nKiB": f"{p.shared / 1024:.1f}",
            "regs": str(p.registers), "blocks\n/SM": str(p.occupancy.blocks), "waves": f"{p.waves.count:.2f}",
        }  # fmt: skip
        if compiled is not None:
            c = compiled[rank - 1]
            cells |= {"compiled\nKiB": "", "compiled\nregs": "", "spilled\nbytes": ""}
            del cells["blocks\n/SM"], cells["waves"]
            if "error" in c:
                notes.append(f"plan {rank} does not compile: {c['error']}")
            else:
                cells["compiled\nKiB"] = f"{c['shared'] / 1024:.1f}"
                cells |= {"compiled\nregs": str(c["registers"]), "spilled\nbytes": str(c["spilled"])}
        if wide:
            cells["flops/\nbyte"] = f"{p.intensity:.1f}"
            if p.needed > 0:
                cells["KiB in flight\n/ needed"] = f"{p.in_flight / 1024:.0f} / {p.needed / 1024:.0f}"
            else:
                cells["stages\nneeded"] = str(p.min_stages)
            cells |= {"occupancy": f"{p.occupancy.warps:.0%}", "limited by": p.occupancy.limit}
            cells["wave\nefficiency"] = f"{p.waves.efficiency:.0%}"
        rows.append(cells)
    return list(rows[0]) if rows else [], [list(cells.values()) for cells in rows], notes


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
