"""What a model's name is on the disk, and what is said of a name that is nothing. PyTorch is not imported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def check_model_path(name: str) -> None:
    """Raise a FileNotFoundError for a name that is neither on the disk nor of the form of a hub id."""
    path = path_of(name)
    if path.exists():
        return
    if path.suffix == ".gguf":
        raise FileNotFoundError(f"model={name!r}: no such file")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise FileNotFoundError(nowhere(name))


def nowhere(name: str) -> str:
    """What is said of a name that can be no hub id."""
    near = nearest(name, {})
    remedy = f"did you mean {near!r}?" if near else "pass the path of one, or a hub id such as 'Qwen/Qwen3-0.6B'"
    return f"model={name!r} is no local directory or .gguf file; {remedy}"


def path_of(name: str) -> Path:
    """Where a name is on the disk. "~user" of a user that is not there stays as it is."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def nearest(name: str, presets: Collection[str]) -> str | None:
    """What a mistyped name was meant to be: a directory with a config.json beside it, or a preset."""
    path = path_of(name)
    try:
        siblings = [p for p in path.parent.iterdir() if (p / "config.json").is_file()]
    except OSError:
        siblings = []
    # A path that has no slash in it would be taken for a hub id.
    named = {p.name: str(p) if p.is_absolute() else f"./{p}" for p in siblings} | {p: p for p in presets}
    near = difflib.get_close_matches(path.name, named, n=1, cutoff=0.7)
    return named[near[0]] if near else None
