"""Results that are kept: results/<device>/<workload>.json, one entry a run; their history, tables and regressions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.bench.job import ResultRow
from nanovllm.hardware.gpu_name import canonical_gpu_name
from nanovllm.hardware.measured_rates import Rates
from nanovllm.hardware.roofline import Work, share_of_limit
from nanovllm.hardware.versions import Provenance, provenance
from nanovllm.json_output import keep_json

SCHEMA = 1
# A ratio may fall by this much, besides the spread of the two measurements, before it counts as a regression.
TOLERANCE = 0.10
# No noise excuses a ratio that fell by more than this.
MOST_ALLOWED = 0.5


@dataclass
class Record(Provenance):
    """Everything that a run of the benchmark found out."""

    rates: Rates | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    rows: list[ResultRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "rows": [row.to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        data = {k: v for k, v in data.items() if k != "schema"}
        rates = Rates(**data["rates"]) if data.get("rates") else None
        return cls(**{**data, "rates": rates, "rows": [ResultRow.from_json(row) for row in data["rows"]]})


def new_record(root: Path, arguments: dict[str, Any]) -> Record:
    """A record of now, of the checkout at `root`."""
    return Record(**asdict(provenance(root)), arguments=arguments)


def add_shares(row: ResultRow, rates: Rates | None) -> None:
    """Fill in a row's shares of the limit: the medians over its repeats.

    An open loop has none, since its time is that of its arrivals. Without a measured rate of the row's dtype, or of
    8-bit floats where it multiplied some, it has no MFU. Nor has it with quantised weights on a CPU, whose products
    may multiply bytes: no rate of these is measured.
    """
    if rates is None or row.error is not None or row.open_loop or not row.repeats:
        return
    matmul = None if row.about.get("quantised") else rates.matmul.get(row.about.get("dtype", ""))
    fp8_matmul = rates.matmul.get("float8") or float("inf")
    if any(r.fp8_flops for r in row.repeats) and not rates.matmul.get("float8"):
        matmul = None
    shares = [
        share_of_limit(
            Work(r.bytes, r.flops, r.fp8_flops), r.seconds, rates.bandwidth, matmul or float("inf"), fp8_matmul
        )
        for r in row.repeats
    ]
    by_limit = sorted(shares, key=lambda s: s.limit)
    middle = by_limit[len(by_limit) // 2]
    row.mbu, row.mfu = middle.mbu, middle.mfu if matmul else None


# -------------------------------------------------------------------------------------------------------------- keeping


def keep(record: Record, folder: Path) -> list[Path]:
    """Add a record's rows to the kept results, each to its workload's file. Rows with errors are not kept."""
    written = []
    for workload in dict.fromkeys(row.workload for row in record.rows):
        rows = [row for row in record.rows if row.workload == workload and row.error is None]
        if not rows:
            continue
        device = record.rates.device if record.rates else rows[0].about["device"]
        path = folder / canonical_gpu_name(device) / f"{workload}.json"
        runs = [*load_runs(path), dataclasses.replace(record, rows=rows)]
        keep_json(path, [r.to_json() for r in runs])
        written.append(path)
    return written


def load_runs(path: Path) -> list[Record]:
    """The kept runs of a workload, oldest first; none if there is no such file."""
    if not path.exists():
        return []
    try:
        return [Record.from_json(data) for data in json.loads(path.read_text())]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of kept results ({error!r}); move it away") from error


_OTHERS = ("fusion.json", "planner.json")
"""What `nanovllm fuse --measure` and `python -m benchmarks.planner_proof` keep in the same folders."""


def kept_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.glob("*/*.json") if f.name not in _OTHERS)


# ----------------------------------------------------------------------------------------------------------- comparing

_SHARED = ("enforce_eager", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
"""Arguments that every engine is given and that change its speed."""


def settings(run: Record, row: ResultRow) -> str:
    """What a row was measured with other than the usual, "kernels rms_norm=native, enforce_eager"; "" if nothing."""
    given = {name: run.arguments.get(name) for name in _SHARED}
    top_p, flags = run.arguments.get("top_p"), (row.about.get("flags") or "").split()
    given["greedy"], given["top_p"] = run.arguments.get("temperature") == 0, None if top_p == 1 else top_p
    given["no AVX-512"] = "AVX2" in flags and not any(flag.startswith("AVX512") for flag in flags)
    if row.engine == "nanovllm":
        given["compiled for"] = row.about.get("compiled_for")
        activations = run.arguments.get("cpu_activations")
        given["activations"] = activations != "float32" and activations
        given["prompt_activations"] = (prompts := run.arguments.get("prompt_activations")) != "auto" and prompts
        given["no expand_small_weights"] = run.arguments.get("expand_small_weights") == "off"
        choices = (run.arguments.get("kernels") or "").split(";")
        given["kernels"] = ";".join(sorted("=".join(p.strip() for p in c.split("=")) for c in choices if c.strip()))
        for name in ("activation_quantization", "capture_prefill"):  # on if they can be
            given[f"no {name}"] = run.arguments.get(name) is False
        if (piggybacked := run.arguments.get("piggyback_prefill")) is not None:
            given["piggyback_prefill" if piggybacked else "no piggyback_prefill"] = True
    return ", ".join(n if v is True else f"{n} {v}" for n, v in sorted(given.items()) if v not in (None, False, ""))


def configuration(run: Record, row: ResultRow) -> tuple[str, ...]:
    """What two rows must have in common for their speeds to say something of the code; all strings."""
    return (*_load(run, row), row.engine, row.variant, settings(run, row))


def _load(run: Record, row: ResultRow) -> tuple[str, ...]:
    """What two engines must have in common for their speeds to say something of them."""
    return row.workload, row.load, row.model, row.about.get("dtype") or ""


def find(rows: Iterable[ResultRow], engine: str, variant: str | None, workload: str, model: str) -> ResultRow | None:
    """The row of a configuration, if it was measured without an error."""
    for row in rows:
        if (row.engine, row.workload, row.model) == (engine, workload, model) and row.error is None:
            if variant is None or row.variant == variant:
                return row
    return None


def ratios(row: ResultRow, rows: Sequence[ResultRow]) -> dict[str, float]:
    """What one row says relative to the rest of the same run, each better if larger.

    Machines differ and so do their neighbours, but what is measured in one run differs alike: these are what can be
    compared over time. The best repeat stands for a row, since noise only ever takes away.
    """
    found = {}
    rate = best_rate(row)
    if row.limit is not None and row.repeats:
        rates = sorted(r.output_rate for r in row.repeats)
        found["share of the limit"] = row.limit * rate / rates[len(rates) // 2]  # the repeat of which the share is
    for other in rows:
        if other is row or other.error is not None or (other.workload, other.model) != (row.workload, row.model):
            continue
        if other.engine != row.engine:
            found[f"times {other.engine}"] = rate / best_rate(other)
        elif other.variant == "native" and row.variant != "native":
            found["times native"] = rate / best_rate(other)
    return found


def best_rate(row: ResultRow) -> float:
    return max(r.output_rate for r in row.repeats)


@dataclass(frozen=True)
class Check:
    """A ratio now and as it was kept; it holds unless it fell by more than `allowed`, of 1."""

    workload: str
    what: str
    now: float
    kept: float
    allowed: float
    commit: str

    @property
    def holds(self) -> bool:
        return self.now >= self.kept * (1 - self.allowed)


def check(record: Record, folder: Path, tolerance: float = TOLERANCE) -> list[Check]:
    """Compare this run's ratios with those of the last kept row of the same device and configuration."""
    checks = []
    device = record.rates.device if record.rates else ""
    for row in record.rows:
        if row.error is not None or row.engine != "nanovllm" or row.variant == "native" or not row.repeats:
            continue
        kept_runs = load_runs(folder / canonical_gpu_name(device) / f"{row.workload}.json")
        # A chip's folder may have runs of products with other memory.
        runs = [run for run in kept_runs if run.rates is None or run.rates.device == device]
        same = [(run, r) for run in runs for r in run.rows if configuration(run, r) == configuration(record, row)]
        if not same:
            continue
        kept, old = same[-1]
        before, now = ratios(old, _rows_beside(kept, old, runs)), ratios(row, record.rows)
        spread = max(row.spread or 0.0, old.spread or 0.0)
        checks += [
            Check(row.workload, what, now[what], before[what], min(tolerance + spread, MOST_ALLOWED), kept.commit)
            for what in now
            if what in before
        ]
    return checks


def _rows_beside(kept: Record, old: ResultRow, runs: Sequence[Record]) -> list[ResultRow]:
    """What a kept row is compared with: of each engine and variant the row of its own run, or else the last one of
    this load.
    """
    found: dict[tuple[str, str], ResultRow] = {}
    for run in (*runs, kept):
        for row in run.rows:
            usual = settings(run, dataclasses.replace(row, engine="")) == settings(
                kept, dataclasses.replace(old, engine="")
            )
            if row.error is None and usual and _load(run, row) == _load(kept, old):
                found[row.engine, row.variant] = row
    return [old, *(row for row in found.values() if row is not old)]
