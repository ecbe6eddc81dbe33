"""The rows of `benchmarks.serving.beside_vllm`: kept in a file as they come, and shown as tables in Markdown."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.hardware.versions import provenance

_ROOT = Path(__file__).resolve().parents[2]
OURS, OFFLINE = "nanovllm", "LLM.generate"
Row = dict[str, Any]
"""part, side, load, round; then either "error", or "output_tokens_per_s" and the spreads "ttft_s" and "itl_s" in
seconds, with "median" and "p99"."""


class ResultFile:
    """Rows, and the file that has all of them after each `add`; None: no file."""

    def __init__(self, path: Path | None, arguments: Row) -> None:
        self.rows: list[Row] = []
        self._path = path
        self._head = {**vars(provenance(_ROOT)), "device": _gpu_name(), "arguments": arguments}
        self._write()

    @classmethod
    def read(cls, path: Path) -> ResultFile:
        data = json.loads(path.read_text())
        found = cls(None, data.get("arguments", {}))
        found.rows = data["rows"]
        return found

    def add(self, part: str, side: str, load: str, turn: int, found: Row) -> None:
        self.rows.append({**found, "part": part, "side": side, "load": load, "round": turn})
        print(f"{part:10}  {side:12}  {load:12}  round {turn}  {_said(found)}", flush=True)
        self._write()

    def find(self, part: str, side: str, load: str) -> list[Row]:
        """The rows without an error."""
        keys = {"part": part, "side": side, "load": load}
        return [row for row in self.rows if keys.items() <= row.items() and not row.get("error")]

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps({**self._head, "rows": self.rows}, indent=1) + "\n")
        os.replace(new, self._path)  # a run that is killed meanwhile leaves a whole file


def _gpu_name() -> str | None:
    """Without a context on the GPU, which would take memory."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _said(row: Row) -> str:
    if row.get("error"):
        return str(row["error"])
    if "output_tokens_per_s" not in row:
        return str(row.get("said", ""))
    failed = f", {row['num_failed']} failed" if row.get("num_failed") else ""
    busy = f", client {row['client_load']:.0%}" if row.get("client_load") is not None else ""
    times = f"TTFT {_pair(row, 'ttft_s')} ms, ITL {_pair(row, 'itl_s')} ms"
    return f"{row['output_tokens_per_s']:9,.0f} tok/s, {times}{busy}{failed}"


def _pair(row: Row, name: str) -> str:
    spread = row.get(name) or {}
    return " / ".join("-" if spread.get(key) is None else f"{1e3 * spread[key]:.1f}" for key in ("median", "p99"))


def _rate(rows: Sequence[Row]) -> float | None:
    return statistics.median(row["output_tokens_per_s"] for row in rows) if rows else None


def _ms(rows: Sequence[Row], name: str, key: str) -> str:
    values = [row[name][key] for row in rows if (row.get(name) or {}).get(key) is not None]
    return f"{1e3 * statistics.median(values):.1f}" if values else "-"


def tables(found: ResultFile) -> str:
    """All rows: medians over the rounds, side by side."""
    return "\n".join([*_std(found), *_structured(found), *_streams(found), *_errors(found)])


def _loads(found: ResultFile, part: str) -> list[str]:
    return list(dict.fromkeys(row["load"] for row in found.rows if row["part"] == part and row["load"]))


def _std(found: ResultFile) -> list[str]:
    lines = []
    for load in _loads(found, "std256"):
        offline, http = (_rate(found.find("std256", side, load)) for side in (OFFLINE, OURS))
        if offline and http:
            both = f"{http:,.0f} tokens/s through HTTP, {offline:,.0f} by LLM.generate"
            lines.append(f"{load}: {both}: {100 * http / offline:.1f} %")
    return lines


def _structured(found: ResultFile) -> list[str]:
    rates = {load: _rate(found.find("structured", OURS, load)) for load in _loads(found, "structured")}
    known = [(load, rate) for load, rate in rates.items() if rate]
    if len(known) < 2:
        return []
    free = known[0][1]
    return [f"{load}: {rate:,.0f} tokens/s, {100 * (rate / free - 1):+.1f} %" for load, rate in known]


def _streams(found: ResultFile) -> list[str]:
    peers = dict.fromkeys(row["side"] for row in found.rows if row["part"] == "streams" and row["side"] != OURS)
    lines: list[str] = []
    for peer in peers or ["-"]:
        names = ["tokens/s", *(f"{name} {key}, ms" for name in ("TTFT", "ITL") for key in ("median", "p99"))]
        heads = ["load", *(head for name in names for head in (f"{name}, {OURS}", peer)), "ratio"]
        body = []
        for load in _loads(found, "streams"):
            sides = [found.find("streams", side, load) for side in (OURS, peer)]
            ours, theirs = map(_rate, sides)
            cells = [load, *("-" if rate is None else f"{rate:,.0f}" for rate in (ours, theirs))]
            cells += [_ms(s, name, key) for name in ("ttft_s", "itl_s") for key in ("median", "p99") for s in sides]
            body.append([*cells, f"{ours / theirs:.2f}" if ours and theirs else "-"])
        if body:
            lines += [_line(heads), _line(["---"] * len(heads)), *map(_line, body)]
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _errors(found: ResultFile) -> list[str]:
    return [f"{row['part']}, {row['side']}, {row['load']}: {row['error']}" for row in found.rows if row.get("error")]
