"""What `nanovllm tune --dry-run` and `nanovllm tune --list` print."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel
    from nanovllm.tune.pruning import Candidates
    from nanovllm.tune.targets import Job


def short(job: Job, plan: Any) -> str:
    """A plan in one line."""
    return " ".join(f"{k}={v}" for k, v in job.tunable.plan_to_json(plan).items())


def dry_run(
    jobs: list[Job], model: DeviceModel, compile: bool, limit: float | None, as_json: bool, search: str, seed: int
) -> None:
    """What would be tried on a GPU, and what not, and why. Nothing is timed or written."""
    from nanovllm.tune.pruning import candidates, compile_all
    from nanovllm.tune.search import trials

    shuffled = f", in the order of --search {search} --seed {seed}" if search == "random" else ""
    documents = []
    for i, job in enumerate(jobs):
        found = candidates(job, model)
        if compile:
            compile_all(job, found, model, None if limit is None else limit / len(jobs))
        if shuffled:
            found.plans = [p for p in trials(found.plans, job.builtin, search, seed) if p in set(found.plans)]
        documents.append(_document(job, found))
        if not as_json:
            print(("\n" if i else "") + _report(job, found, shuffled), flush=True)
    if as_json:
        print(json.dumps({"gpu": model.name, "jobs": documents}, indent=1))
    elif documents:
        print(f"\nfor {model.name}; nothing was timed or written")


def _document(job: Job, found: Candidates) -> dict[str, Any]:
    def row(plan: Any) -> dict[str, Any]:
        data = {"config": job.tunable.plan_to_json(plan)}
        if plan in found.predicted:
            data["predicted_us"] = round(1e6 * found.predicted[plan], 3)
        if plan in found.compiled:
            data |= dict(zip(("shared_bytes", "registers", "spilled_bytes"), found.compiled[plan]))
        return data

    return {
        "op": job.target.op,
        "tunable": job.tunable.name,
        "key": job.tunable.key_to_json(job.key),
        "shapes": [list(s) for s in job.shapes],
        "builtin": job.tunable.plan_to_json(job.builtin),
        "combinations": found.total,
        "pruned": {
            source: [
                {"reason": r, "count": n, "example": _example(job, p.examples[r])} for r, n in p.counts.most_common()
            ]
            for source, p in found.pruned.items()
        },
        "remarks": found.remarks,
        "candidates": [row(plan) for plan in found.plans],
    }


def _example(job: Job, example: Any) -> dict[str, Any]:
    return dict(example) if isinstance(example, dict) else job.tunable.plan_to_json(example)


def _report(job: Job, found: Candidates, shuffled: str) -> str:
    shapes = ", ".join("x".join(map(str, s)) for s in job.shapes)
    lines = [
        str(job),
        f"  shapes: {shapes}",
        f"  built in: {short(job, job.builtin)}",
        f"  {found.total} combinations",
    ]
    for source, pruned in found.pruned.items():
        lines += [f"  - {n:5} left out by the {source}: {reason}" for reason, n in pruned.counts.most_common()]
    lines += [f"  ({remark})" for remark in found.remarks]
    order = shuffled or (", the most promising first" if found.predicted else "")
    lines.append(f"  = {len(found.plans):5} to try{order}:")
    for plan in found.plans[:8]:
        text = f"      {short(job, plan)}"
        if plan in found.predicted:
            text += f"  predicted {1e6 * found.predicted[plan]:.2f} us"
        if plan in found.compiled:
            shared, registers, _ = found.compiled[plan]
            text += f"  {shared / 1024:.1f} KiB shared, {registers} registers"
        lines.append(text)
    if len(found.plans) > 8:
        lines.append(f"      and {len(found.plans) - 8} more; --json has all")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------------ list


def show_configurations(op: str | None, device: str, named: str | None, as_json: bool) -> None:
    """What can be tuned, and what is in force here and from where; with a GPU's name, what would be on such a one with these versions."""
    from nanovllm.engine.model_runner import select_device
    from nanovllm.hardware.gpu_presets import device_model
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE, SHIPPED, gpu_of, paths
    from nanovllm.kernels.triton.tunables import ALL
    from nanovllm.tune.targets import TARGETS, target

    gpu = gpu_of(select_device(device)) if named is None else device_model(named).name
    wanted = {t.name for t in target(op).choices} if op is not None else set(ALL)
    rows = [_tunable_row(ALL[name], gpu) for name in ALL if name in wanted]
    for row in rows:
        row["ops"] = [t.op for t in TARGETS.values() if row["tunable"] in {c.name for c in t.choices}]
    files = [str(p) for p in paths(gpu)] if gpu else []
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if as_json:
        print(json.dumps({"gpu": gpu, "directory": directory, "files": files, "tunables": rows}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "tunable",
        "ops",
        "chosen by",
        "configuration",
        "in force",
        "not used",
        title=f"kernel configurations on {gpu or 'cpu'}",
    )
    for r in rows:
        stale = "; ".join(f"{n}: {reason}" for reason, n in r["stale"].items())
        table.add_row(
            r["tunable"], ", ".join(r["ops"]), ", ".join(r["key"]), "; ".join(r["parameters"]), _in_force(r), stale
        )
    # A file or a pipe has no width: nothing is cut off there.
    (Console() if sys.stdout.isatty() else Console(width=240)).print(table)
    if gpu is None:
        print("Configurations are per GPU; there is none here: kernels choose by themselves.")
    print(f"read: {', '.join(files) or 'no file'}")
    own = directory or "not set"
    if directory and not Path(directory).expanduser().is_dir():
        own += ", which does not exist" if not Path(directory).expanduser().exists() else ", which is no directory"
    print(f"shipped: {SHIPPED}; own, {DIRECTORY_VARIABLE}: {own}")


def _in_force(row: dict[str, Any]) -> str:
    if row["reason"]:
        return row["reason"]
    from nanovllm.kernels.op.config_files import SHIPPED

    sources = [f"{n} {'shipped' if Path(path).parent == SHIPPED else 'own'}" for path, n in row["in_force"].items()]
    return ", ".join(sources) or "built in"


def _tunable_row(tunable: Any, gpu: str | None) -> dict[str, Any]:
    from dataclasses import fields

    from nanovllm.kernels.op.config_files import document, entries, paths

    row: dict[str, Any] = {
        "tunable": tunable.name, "key": list(tunable.key), "parameters": [], "in_force": {}, "stale": {}, "configs": [], "reason": None,
    }  # fmt: skip
    try:
        row["parameters"] = [f"{name}({', '.join(f.name for f in fields(c))})" for name, c in tunable.classes.items()]
        found = entries(tunable, gpu) if gpu else []
    except ImportError as e:
        row["reason"] = f"cannot be loaded here: {e}"
        return row
    for e in found:
        if e.stale:
            row["stale"][e.stale] = row["stale"].get(e.stale, 0) + 1
    written = [data for path in (paths(gpu) if gpu else []) for data in document(path)["entries"]]
    others = sum(data["tunable"] == tunable.name for data in written) - len(found)
    if others:
        row["stale"]["measured with kernels that had other parameters"] = others
    chosen = {e.key: e for e in found if not e.stale}
    for e in chosen.values():
        row["in_force"][str(e.path)] = row["in_force"].get(str(e.path), 0) + 1
        row["configs"].append(
            {**{k: e.data.get(k) for k in ("key", "config", "us", "builtin_us", "date")}, "file": str(e.path)}
        )
    return row
