"""What `nanovllm tune --dry-run` and `nanovllm tune --list` print."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel
    from nanovllm.tune.jobs import Candidates, Job


def short(job: Job, plan: Any) -> str:
    """A plan in one line."""
    return " ".join(f"{k}={v}" for k, v in job.tunable.plan_to_json(plan).items())


def show_dry_run(jobs: list[Job], model: DeviceModel, as_json: bool) -> None:
    """What would be tried on a GPU, and what not, and why. Nothing is timed or written."""
    from nanovllm.tune.jobs import candidates

    documents = []
    for i, job in enumerate(jobs):
        found = candidates(job, model)
        to_json = job.tunable.plan_to_json
        documents.append(
            {
                "op": job.target.op,
                "tunable": job.tunable.name,
                "key": job.tunable.key_to_json(job.key),
                "shapes": [list(s) for s in job.shapes],
                "builtin": to_json(job.builtin),
                "combinations": found.total,
                "left_out": dict(found.left_out),
                "candidates": [to_json(plan) for plan in found.plans],
            }
        )
        if not as_json:
            print(("\n" if i else "") + _report(job, found), flush=True)
    if as_json:
        print(json.dumps({"gpu": model.name, "jobs": documents}, indent=1))
    elif documents:
        print(f"\nfor {model.name}; nothing was timed or written")


def _report(job: Job, found: Candidates) -> str:
    from nanovllm.tune.search import Budget

    shapes, most = ", ".join("x".join(map(str, s)) for s in job.shapes), Budget().most
    lines = [str(job), f"  shapes: {shapes}", f"  built in: {short(job, job.builtin)}", f"  {found.total} combinations"]
    lines += [f"  - {n:5} left out: {reason}" for reason, n in found.left_out.most_common()]
    few = "" if len(found.plans) <= most else f", at most {most} of them"
    lines.append(
        f"  = {len(found.plans):5} to try{few}, those near the built-in choice first, then those near the best:"
    )
    lines += [f"      {short(job, plan)}" for plan in found.plans[:8]]
    if len(found.plans) > 8:
        lines.append(f"      and {len(found.plans) - 8} more; --json has all")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------- list


def show_configurations(op: str | None, device: str, named: str | None, as_json: bool) -> None:
    """What can be tuned, and what is in force here or on a named GPU, with these versions, and from where."""
    from nanovllm.engine.devices import select_device
    from nanovllm.hardware.gpu_presets import device_model
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE, SHIPPED, gpu_of, paths
    from nanovllm.kernels.triton.tunables import ALL
    from nanovllm.tune.jobs import TARGETS, target

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

    columns = "tunable", "ops", "chosen by", "configuration", "in force", "not used"
    table = Table(*columns, title=f"kernel configurations on {gpu or 'cpu'}")
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
        "tunable": tunable.name, "key": list(tunable.key), "parameters": [], "in_force": {}, "stale": {}, "configs": [],
        "reason": None,
    }  # fmt: skip
    try:
        row["parameters"] = [f"{name}({', '.join(f.name for f in fields(c))})" for name, c in tunable.classes.items()]
        found = entries(tunable, gpu) if gpu else []
    except ImportError as e:
        row["reason"] = f"cannot be loaded here: {e}"
        return row
    for entry in found:
        if entry.stale:
            row["stale"][entry.stale] = row["stale"].get(entry.stale, 0) + 1
    written = [data for path in (paths(gpu) if gpu else []) for data in document(path)["entries"]]
    others = sum(data["tunable"] == tunable.name for data in written) - len(found)
    if others:
        row["stale"]["measured with kernels that had other parameters"] = others
    for entry in {entry.key: entry for entry in found if not entry.stale}.values():
        row["in_force"][str(entry.path)] = row["in_force"].get(str(entry.path), 0) + 1
        shown = {name: entry.data.get(name) for name in ("key", "config", "us", "builtin_us", "date")}
        row["configs"].append({**shown, "file": str(entry.path)})
    return row
