"""Measured groups that are kept: results/<device>/fusion.json, the latest run of each module and batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.fuse.group_timing import WAYS, Agreement, Comparison, GroupTiming
from nanovllm.hardware.gpu_name import canonical_gpu_name
from nanovllm.hardware.versions import provenance
from nanovllm.json_output import keep_json

SCHEMA = 1


def document(rows: Sequence[Comparison], device: str, arguments: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """A run as JSON: what was measured when, on what and with which versions; times in microseconds.

    Args:
        device: its full name, such as "NVIDIA H200".
        arguments: what tells this run from others: the module and its batch.
        root: the checkout whose commit is noted.
    """
    found = asdict(Agreement.of(rows))
    rank, unfused, fused = (None if value is None else round(value, 4) for value in found.values())
    return {
        "schema": SCHEMA, **asdict(provenance(root)), "device": device, "arguments": dict(arguments),
        "rank_correlation": rank, "median_error_unfused": unfused, "median_error_fused": fused,
        "groups": [_group(r) for r in rows],
    }  # fmt: skip


def keep(run: Mapping[str, Any], folder: Path) -> Path:
    """Write a run into `folder`/<device>/fusion.json, in place of an earlier one of the same arguments.

    Raises:
        ValueError: the file has another content.
    """
    path = folder / canonical_gpu_name(run["device"]) / "fusion.json"
    runs = [r for r in load(path) if r["arguments"] != run["arguments"]] + [dict(run)]
    keep_json(path, runs)
    return path


def load(path: Path) -> list[dict[str, Any]]:
    """The kept runs; none if there is no such file."""
    if not path.exists():
        return []
    try:
        runs = json.loads(path.read_text())
        if not all(r["schema"] == SCHEMA and "groups" in r for r in runs):
            raise ValueError("another schema")
        return runs
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of measured fusions ({error!r}); move it away") from error


def _group(r: Comparison) -> dict[str, Any]:
    same = {name: getattr(r, name) for name in ("number", "ops", "kernels", "served", "inputs")}
    predicted = {f"predicted_{way}_us": _micros(getattr(r, f"predicted_{way}")) for way in ("unfused", "fused")}
    return {**same, **predicted, **{way: _measured(getattr(r, way)) for way in WAYS}}


def _measured(m: GroupTiming) -> dict[str, Any]:
    if m.seconds is None:
        return {"reason": m.reason}
    found = {"us": _micros(m.seconds), "relative_error": m.error}
    return {**found, "not_compared": m.reason} if m.reason else found


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 3)
