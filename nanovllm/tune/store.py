"""Write what was found into the files that kernels read: all at once, and other entries are kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm.hardware.versions import versions
from nanovllm.json_output import keep_json
from nanovllm.kernels.op.config_files import SCHEMA, SHIPPED, entry_of, forget_files, read_document
from nanovllm.kernels.triton.tunables import ALL
from nanovllm.tune.jobs import TuningJob
from nanovllm.tune.search import Outcome

logger = logging.getLogger(__name__)
Entry = Mapping[str, Any]


def entry(job: TuningJob, outcome: Outcome, left_out: Mapping[str, int], about: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of a file: the winner, and how it was found.

    Args:
        outcome: the result of a search that found a winner.
        left_out: reason -> how many plans were not tried for it.
        about: facts about the run: device, date, commit.
    """
    tunable, nothing = job.tunable, (None, None)
    (best, seconds), (second, second_seconds) = (*outcome.ranking.items(), nothing)[:2]

    def config(plan: Any) -> dict[str, Any] | None:
        return None if plan is None else tunable.plan_to_json(plan)

    def us(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e6 * seconds, 3)

    return {
        "tunable": tunable.name, "source": tunable.source, "versions": versions(),
        "key": tunable.key_to_json(job.key), "config": config(best), "us": us(seconds),
        "builtin": config(job.builtin), "builtin_us": us(outcome.ranking.get(job.builtin)),
        "runner_up": config(second), "runner_up_us": us(second_seconds), "op": job.op.name,
        "provider": job.provider.name, "shapes": [list(shape) for shape in job.shapes],
        "dtype": str(job.dtype).removeprefix("torch."),
        "method": "CUDA graph, L2 cold, median; geometric mean over the shapes", "tried": outcome.tried,
        "given_up_early": outcome.slower, "skipped": dict(outcome.skipped), "pruned": dict(left_out),
        "untried": outcome.untried, "stopped": outcome.stopped, "seconds": round(outcome.elapsed, 1), **about,
    }  # fmt: skip


def save(gpu: str, new: Sequence[Entry], directory: Path, keep: Callable[[Entry], bool] = lambda data: True) -> Path:
    """Write entries into a GPU's file, in place of those for the same key and versions. `keep` tells which others stay.

    A file that cannot be read is set aside, with a warning; its readable entries are kept.

    Raises:
        ValueError: a new entry would not be read.
    """
    import fcntl

    for data in new:
        tunable = ALL[data["tunable"]]
        tunable.plan_from_json(data["config"], tunable.key_from_json(data["key"]))
    path = directory / f"{gpu}.json"

    def identity(data: Entry) -> str:
        return json.dumps([data["tunable"], data["key"], data["versions"]], sort_keys=True)

    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{gpu}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time reads, adds and replaces
        kept, wrong = readable(path)
        if wrong is not None:
            names = (path.with_suffix(f".broken{n or ''}") for n in itertools.count())
            broken = next(name for name in names if not name.exists())
            broken.write_bytes(path.read_bytes())
            logger.warning("%s; set aside as %s, %d of its entries are kept", wrong, broken.name, len(kept))
        entries = {identity(data): data for data in kept if keep(data)} | {identity(data): dict(data) for data in new}
        keep_json(path, {"schema": SCHEMA, "gpu": gpu, "entries": [entries[key] for key in sorted(entries)]})
    forget_files()
    return path


def readable(path: Path) -> tuple[list[Entry], str | None]:
    """(the entries of a file that can be read, None or what is wrong with the others or with all of it)."""
    if not path.exists():
        return [], None
    wrong, found = None, []
    try:
        read_document(path)
    except ValueError as e:
        wrong = str(e).partition("; write it anew")[0]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = list(json.loads(path.read_text())["entries"])
    kept: list[Entry] = []
    for i, data in enumerate(found):
        try:
            if data["tunable"] in ALL:
                entry_of(ALL[data["tunable"]], data, path)
            kept.append({**data, "source": data["source"], "versions": {**data["versions"]}})
        except (ValueError, KeyError, TypeError) as e:
            wrong = wrong or f"{path}: entries[{i}].{e}"
    return kept, wrong


def drop_changed(directory: Path = SHIPPED) -> list[str]:
    """Remove the entries whose kernel's source has changed from all files of a directory; a line for each."""

    def current(data: Entry) -> bool:
        return data["tunable"] in ALL and data["source"] == ALL[data["tunable"]].source

    dropped = []
    for path in sorted(directory.glob("*.json")):
        changed = [data for data in read_document(path)["entries"] if not current(data)]
        if changed:
            save(path.stem, [], directory, keep=current)
        dropped += [f"{path.name}: {data['tunable']} {json.dumps(data['key'])}" for data in changed]
    return dropped
