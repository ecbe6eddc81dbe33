"""What `--json` means in every command: a file to write, or `-` for the standard output in place of tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STDOUT = "-"
HELP = "Write everything to this file as JSON; - prints it in place of tables."


def check_target(target: str | None) -> str | None:
    """`target`, if `write_json` can write there: said at once, and not after a long run.

    Raises:
        ValueError: it is a folder, or a file is in the way of its folder.
    """
    if target in (None, STDOUT):
        return target
    path = Path(str(target))
    there = next(p for p in (path.parent, *path.absolute().parents) if p.exists())
    if path.is_dir():
        raise ValueError(f"--json {target}: it is a folder, expected a file")
    if not there.is_dir():
        raise ValueError(f"--json {target}: {there} is a file, expected a folder")
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
