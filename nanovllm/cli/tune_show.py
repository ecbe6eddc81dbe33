"""What `nanovllm tune --dry-run` and `nanovllm tune --list` print."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.text_table import print_table
from nanovllm.console import WIDTH, Column, TablePrinter, say
from nanovllm.json_output import STDOUT, write_json
from nanovllm.kernels.op.inputs import written

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel
    from nanovllm.kernels.op.tunable import Tunable
    from nanovllm.tune.jobs import TuningJob
    from nanovllm.tune.space import Candidates


def show_dry_run(jobs: list[TuningJob], model: DeviceModel, json_file: str | None) -> None:
    """What would be tried on a GPU, and what not, and why. Nothing is timed or written."""
    from nanovllm.tune.spaces import candidates

    documents: list[dict[str, Any]] = []
    for job in jobs:
        found = candidates(job.tunable, job.key, job.builtin, model)
        to_json = job.tunable.plan_to_json
        document = {
            "op": job.op.name,
            "tunable": job.tunable.name,
            "key": job.tunable.key_to_json(job.key),
            "shapes": [list(s) for s in job.shapes],
            "builtin": to_json(job.builtin),
            "combinations": found.total,
            "left_out": dict(found.left_out),
            "candidates": [to_json(plan) for plan in found.plans],
        }
        if json_file != STDOUT:
            print(("\n" if documents else "") + _report(job, found), flush=True)
        documents.append(document)
    if not write_json(json_file, {"gpu": model.name, "jobs": documents}) and documents:
        print(f"\nfor {model.name}; nothing was timed or written")


def _report(job: TuningJob, found: Candidates) -> str:
    from nanovllm.tune.search import Budget

    text, most = job.tunable.plan_text, Budget().most
    lines = [str(job), f"  shapes: {', '.join(map(written, job.shapes))}", f"  built in: {text(job.builtin)}"]
    lines += [f"  {found.total} combinations"]
    lines += [f"  - {n:5} left out: {reason}" for reason, n in found.left_out.most_common()]
    few = "" if len(found.plans) <= most else f", at most {most} of them"
    lines.append(f"  = {len(found.plans):5} to try{few}, near the built-in choice first, then near the best:")
    lines += [f"      {text(plan)}" for plan in found.plans[:8]]
    if len(found.plans) > 8:
        lines.append(f"      and {len(found.plans) - 8} more; `--json -` shows all")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False) for line in lines)


# ---------------------------------------------------------------------------------------------------------------- list


def show_configurations(op: str | None, device: str, named: str | None, wide: bool, json_file: str | None) -> None:
    """What can be tuned, and what is in use here or on a named GPU, with these versions, and from where."""
    from nanovllm.hardware.devices import select_device
    from nanovllm.hardware.gpu_presets import device_model
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE, SHIPPED, gpu_of, paths
    from nanovllm.kernels.triton.tunables import ALL
    from nanovllm.tune.jobs import TUNABLES, check_tunable

    gpu = gpu_of(select_device(device)) if named is None else device_model(named).name
    wanted = ALL.values() if op is None else TUNABLES[check_tunable(op)]
    rows = [_tunable_row(tunable, gpu) for tunable in wanted]
    files = [str(p) for p in paths(gpu)] if gpu else []
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if write_json(json_file, {"gpu": gpu, "directory": directory, "files": files, "tunables": rows}):
        return
    title = f"kernel configurations on {gpu or 'cpu'}"
    if wide:
        cells, reasons = [], list(dict.fromkeys(reason for r in rows for reason in r["stale"]))
        for r in rows:
            stale = ", ".join(f"{n} [{reasons.index(reason) + 1}]" for reason, n in r["stale"].items())
            texts = map(", ".join, (r["ops"], r["key"]))
            cells.append((r["tunable"], *texts, "; ".join(r["parameters"]), _in_force(r), stale))
        head = "tunable", "ops", "chosen by", "configuration", "in use", "not used"
        print_table(head, cells, head, title, wide=True)
        for i, reason in enumerate(reasons, 1):
            say(f"[{i}] {reason}")
    else:
        narrow = TablePrinter(Column("tunable", 24), Column("ops", 22), Column("in use", 32), title=title)
        for r in rows:
            unused = f"; {sum(r['stale'].values())} not used {''.join(map(narrow.note, r['stale']))}"
            narrow.add(r["tunable"], r["ops"][0], _in_force(r) + (unused if r["stale"] else ""))
            for name in r["ops"][1:]:
                narrow.add("", name, "")
        narrow.end()
        print("built in: the kernel's own rule. --wide: what a choice depends on, what it sets.")
    if gpu is None:
        print("There is no GPU here. `--gpu h200` shows the configurations for an H200.")
    print(f"files that were read: {', '.join(files) or 'none'}")
    own = directory or "not set"
    if directory and not Path(directory).expanduser().is_dir():
        own += ", which does not exist" if not Path(directory).expanduser().exists() else ", which is no directory"
    print(f"directory of the package: {SHIPPED}\nyour directory, {DIRECTORY_VARIABLE}: {own}")


def _in_force(row: dict[str, Any]) -> str:
    from nanovllm.kernels.op.config_files import SHIPPED

    if row["reason"]:
        return row["reason"]
    whose = {path: "the package" if Path(path).parent == SHIPPED else "yours" for path in row["in_force"]}
    sources = [f"{n} of {whose[path]}" for path, n in row["in_force"].items()]
    return ", ".join(sources) or "built in"


def _tunable_row(tunable: Tunable, gpu: str | None) -> dict[str, Any]:
    from nanovllm.kernels.op.config_files import entries, paths, read_document
    from nanovllm.tune.jobs import TUNABLES

    row: dict[str, Any] = {
        "tunable": tunable.name, "ops": [op for op, choices in TUNABLES.items() if tunable in choices],
        "key": list(tunable.key), "parameters": [], "in_force": {}, "stale": {}, "configs": [], "reason": None,
    }  # fmt: skip
    try:
        row["parameters"] = [f"{name}({', '.join(f.name for f in fields(c))})" for name, c in tunable.classes.items()]
        found = entries(tunable, gpu) if gpu else []
    except ImportError as e:
        return {**row, "reason": f"cannot be loaded here: {e}"}
    in_force = list({entry.key: entry for entry in found if not entry.stale}.values())
    stale = Counter(entry.stale for entry in found if entry.stale)
    in_files = [data["tunable"] for path in (paths(gpu) if gpu else []) for data in read_document(path)["entries"]]
    if others := in_files.count(tunable.name) - len(found):
        stale["measured with kernels that had other parameters"] = others
    shown = ("key", "config", "us", "builtin_us", "date")
    configs = [{**{name: e.data.get(name) for name in shown}, "file": str(e.path)} for e in in_force]
    return {**row, "in_force": Counter(str(e.path) for e in in_force), "stale": stale, "configs": configs}
