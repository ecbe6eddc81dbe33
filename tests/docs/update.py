"""`python -m tests.docs.update`: write what commands print now into docs/CUSTOM_KERNEL_QUICKSTART.md, and the table of
ops into docs/kernels.md. Blocks that need a GPU are left as they are where there is none. Read the difference before
you keep
it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Workplace, blocks
from tests.warm_python import WarmPython, started

QUICKSTART = REPOSITORY / "docs" / "CUSTOM_KERNEL_QUICKSTART.md"
KERNELS = REPOSITORY / "docs" / "kernels.md"
TABLE_MARKERS = ("<!-- nanovllm kernels table -->\n", "<!-- end of table -->\n")


def printed_table(python: WarmPython) -> str:
    """What `nanovllm kernels table` prints."""
    return python.run("-m", "nanovllm", "kernels", "table", check=True, cwd=REPOSITORY).stdout


def embedded_table(document: str) -> str:
    """What stands between the markers."""
    return document.split(TABLE_MARKERS[0])[1].split(TABLE_MARKERS[1])[0]


def with_outputs(document: str, directory: Path, python: WarmPython) -> str:
    """The document with what its commands print on this machine. Output goes in where some was shown before."""
    place = Workplace(directory, NEEDS, python)
    pieces, end = [], 0
    for block in blocks(document):
        if not place.runs(block):
            continue
        results = {(command, tuple(shown)): printed for command, shown, printed in place.run(block)}
        if "gpu" not in block.words and not any(shown for _, shown in results):
            continue
        lines = []
        for command, shown in block.commands():
            printed = results.get((command, tuple(shown)), "")
            kept = [line.rstrip() for line in printed.splitlines() if line.strip() and not _is_noise(line)]
            lines += [f"$ {command}", *(kept if shown or "gpu" in block.words else ())]
        pieces += [document[end : block.start], "\n".join(lines) + "\n"]
        end = block.end
    return "".join(pieces) + document[end:]


def _is_noise(line: str) -> bool:
    return line.lstrip().startswith("Generating")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, started() as python:
        QUICKSTART.write_text(with_outputs(QUICKSTART.read_text(), Path(directory) / "work", python))
        table = printed_table(python)
    document = KERNELS.read_text()
    before, rest = document.split(TABLE_MARKERS[0])
    after = rest.split(TABLE_MARKERS[1])[1]
    KERNELS.write_text(before + TABLE_MARKERS[0] + table + TABLE_MARKERS[1] + after)


if __name__ == "__main__":
    main()
