"""Writing what was found, in the form that `kernels.configs` reads: beside older entries, all at once or not at all."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanovllm.hardware.versions import versions
from nanovllm.kernels.op.config_files import ENTRY_FIELDS, SCHEMA, SHIPPED, document, entry_of, forget_files
from nanovllm.kernels.triton.tunables import ALL
from nanovllm.tune.search import Outcome
from nanovllm.tune.targets import Job

logger = logging.getLogger(__name__)


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
        ValueError: an entry would not be read.
    """
    for data in new:
        tunable = ALL[data["tunable"]]
        tunable.plan_from_json(data["config"], tunable.key_from_json(data["key"]))
    return _write(gpu, new, directory)


def drop_changed(directory: Path = SHIPPED) -> list[str]:
    """Remove the entries that no kernel finds since its source has changed, from all files of a directory; a line for each."""
    dropped = []
    for path in sorted(directory.glob("*.json")):
        changed = [data for data in document(path)["entries"] if not _current(data)]
        if changed:
            _write(path.stem, [], directory, keep=_current)
        dropped += [f"{path.name}: {data['tunable']} {json.dumps(data['key'])}" for data in changed]
    return dropped


def _current(data: Mapping[str, Any]) -> bool:
    return data["tunable"] in ALL and data["source"] == ALL[data["tunable"]].source


def mend(gpu: str, directory: Path) -> None:
    """If a GPU's file is malformed, set it aside, and write anew what can be read of it: before a run measures for it."""
    path = directory / f"{gpu}.json"
    if path.exists() and readable(path)[1] is not None:
        _write(gpu, [], directory)


def readable(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """(the entries of a file that can be read, None or what is wrong with the others or all of it)."""
    if not path.exists():
        return [], None
    wrong = None
    try:
        found = document(path)["entries"]
    except ValueError as e:
        wrong = str(e).partition("; write it anew")[0]
        found = _entries_of_malformed(path)
    kept = []
    for i, data in enumerate(found):
        try:
            if data["tunable"] in ALL:
                entry_of(ALL[data["tunable"]], data, path)
            kept.append(data)
        except (ValueError, KeyError, TypeError) as e:
            wrong = wrong or f"{path}: entries[{i}].{e}"
    return kept, wrong


def _entries_of_malformed(path: Path) -> list[dict[str, Any]]:
    """Those with the fields that every entry has, of a file that is not quite one."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("entries"), list):
        return []
    return [
        e for e in data["entries"] if isinstance(e, dict) and all(type(e.get(n)) is k for n, k in ENTRY_FIELDS.items())
    ]


def _write(
    gpu: str, new: Sequence[Mapping[str, Any]], directory: Path, keep: Callable[[Mapping[str, Any]], bool] = lambda data: True
) -> Path:  # fmt: skip
    path = directory / f"{gpu}.json"

    def identity(data: Mapping[str, Any]) -> str:
        return json.dumps([data["tunable"], data["key"], data["versions"]], sort_keys=True)

    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory / f"{gpu}.lock"):
        kept, wrong = readable(path)
        if wrong is not None:
            _set_aside(path, wrong, len(kept))
        replaced = {identity(data) for data in new}
        entries = [data for data in kept if keep(data) and identity(data) not in replaced] + [
            dict(data) for data in new
        ]
        entries.sort(key=identity)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_text(json.dumps({"schema": SCHEMA, "gpu": gpu, "entries": entries}, indent=1) + "\n")
            part.replace(path)  # a reader sees the old file or the new one
        finally:
            part.unlink(missing_ok=True)
    forget_files()
    return path


def _set_aside(path: Path, wrong: str, kept: int) -> None:
    names = (path.with_suffix(f".broken{n or ''}") for n in itertools.count())
    broken = next(name for name in names if not name.exists())
    shutil.copy2(path, broken)  # the file itself is replaced as any other
    logger.warning("%s; set aside as %s, %d of its entries are kept", wrong, broken.name, kept)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """One process at a time reads, adds and replaces; the kernel drops the lock with the process that holds it."""
    import fcntl

    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e6 * seconds, 3)
