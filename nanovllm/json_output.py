"""JSON for people: what `--json` means in every command (a file to write, or `-` for the standard output in place of
tables), and files that are kept in few lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

STDOUT = "-"
HELP = "Write everything to this file as JSON; - prints it in place of tables."


def check_target(target: str | None) -> str | None:
    """`target`, if `write_json` can write there: said at once, and not after a long run.

    Raises:
        ValueError: it is a folder, a file is in the way of its folder, or it must not be written.
    """
    if target in (None, STDOUT):
        return target
    path = Path(str(target))
    there = next(p for p in (path.parent, *path.absolute().parents) if p.exists())
    if path.is_dir():
        raise ValueError(f"--json {target}: it is a folder, expected a file")
    if not there.is_dir():
        raise ValueError(f"--json {target}: {there} is a file, expected a folder")
    if not os.access(path if path.exists() else there, os.W_OK):
        raise ValueError(
            f"--json {target}: {path if path.exists() else there} cannot be written; name another file, or -"
        )
    return target


def write_json(target: str | None, document: Any) -> bool:
    """Write a document to where `--json` says.

    Args:
        target: a file, "-", or None: nothing is written.

    Returns:
        Whether the standard output has it, so that no table may follow.

    Raises:
        ValueError: the file cannot be written.
    """
    if target is None:
        return False
    text = json.dumps(document, indent=1)
    if target == STDOUT:
        print(text)
        return True
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    except OSError as e:
        raise ValueError(f"--json {target}: {e.strerror}; expected a file that can be written, or -") from None
    return False


def compact_json(value: Any, name: str = "", depth: int = 0, width: int = 120) -> str:
    """`value` as JSON whose lines are filled up to `width`: a list or an object is broken only if it is longer.

    Args:
        name: what stands before the value in its line.
        depth: spaces before the value's line.
    """
    whole = f"{name}{json.dumps(value)}"
    if depth + len(whole) < width or not isinstance(value, (dict, list)):
        return whole
    named = isinstance(value, dict)
    lines: list[str] = []
    for key in value if named else range(len(value)):
        item = compact_json(value[key], f"{json.dumps(key)}: " if named else "", depth + 1, width)
        full = not lines or "\n" in lines[-1] + item or depth + len(lines[-1]) + len(item) + 4 > width
        lines[len(lines) - (not full) :] = [item if full else f"{lines[-1]}, {item}"]
    edge = "\n" + " " * depth
    return f"{whole[: len(name) + 1]}{edge} {f',{edge} '.join(lines)}{edge}{whole[-1]}"


def keep_json(path: Path, document: Any) -> None:
    """Write a file in few lines, and the folders above it. A reader sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(compact_json(document) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
