"""Writing what was found, in the form that `kernels.configs` reads: beside older entries, all at once or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm.kernels.configs import SCHEMA, document, forget_files
from nanovllm.kernels.tunables import ALL
from nanovllm.kernels.versions import versions
from nanovllm.perf.autotune.search import Outcome
from nanovllm.perf.autotune.targets import Job


def entry(job: Job, outcome: Outcome[Any], pruned: Mapping[str, int], about: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of a file: the winner, and how it was found.

    Args:
        pruned: reason -> how many plans were not tried for it.
        about: of the run: device, date, commit, search, seed.

    Raises:
        ValueError: the search found nothing.
    """
    if outcome.best is None:
        raise ValueError(f"{job}: expected a winner to write, got none")
    tunable = job.tunable

    def config(plan: Any) -> dict[str, Any] | None:
        return None if plan is None else tunable.plan_to_json(plan)

    return {
        "tunable": tunable.name,
        "source": tunable.source,
        "versions": versions(),
        "key": tunable.key_to_json(job.key),
        "config": config(outcome.best),
        "us": _us(outcome.seconds),
        "builtin": config(job.builtin),
        "builtin_us": _us(outcome.default_seconds),
        "runner_up": config(outcome.runner_up),
        "runner_up_us": _us(outcome.runner_up_seconds),
        "op": job.target.op,
        "provider": job.target.launcher.name,
        "shapes": [list(shape) for shape in job.shapes],
        "dtype": str(job.dtype).removeprefix("torch."),
        "method": "CUDA graph, L2 cold, median; geometric mean over the shapes",
        "tried": outcome.tried,
        "given_up_early": outcome.slower,
        "skipped": dict(outcome.skipped),
        "pruned": dict(pruned),
        "untried": outcome.untried,
        "stopped": outcome.stopped,
        "seconds": round(outcome.elapsed, 1),
        **about,
    }


def save(gpu: str, new: Sequence[Mapping[str, Any]], directory: Path) -> Path:
    """Write entries into a GPU's file, in place of those for the same key and versions; others are kept.

    Raises:
        ValueError: the file that is there is malformed, or an entry would not be read.
    """
    path = directory / f"{gpu}.json"
    for data in new:
        tunable = ALL[data["tunable"]]
        tunable.plan_from_json(data["config"], tunable.key_from_json(data["key"]))
    kept = document(path)["entries"] if path.exists() else []

    def identity(data: Mapping[str, Any]) -> str:
        return json.dumps([data["tunable"], data["key"], data["versions"]], sort_keys=True)

    replaced = {identity(data) for data in new}
    entries = [data for data in kept if identity(data) not in replaced] + [dict(data) for data in new]
    entries.sort(key=identity)
    directory.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps({"schema": SCHEMA, "gpu": gpu, "entries": entries}, indent=1) + "\n")
        part.replace(path)  # a reader sees the old file or the new one
    finally:
        part.unlink(missing_ok=True)
    forget_files()
    return path


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e6 * seconds, 3)
