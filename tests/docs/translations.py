"""`python -m tests.docs.translations`: put the English documents' code blocks into their translations, in order.

A translation has the same fenced blocks as its original, byte for byte; the text between them is its own. Where the
number of blocks differs, a person has to look: nothing is written.
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.runnable_markdown import REPOSITORY, blocks

LANGUAGE = "zh-CN"
DOCS = REPOSITORY / "docs"
COURSE = DOCS / "CUSTOM_CUDA_KERNEL_GUIDE.md"
CHAPTERS = tuple(sorted(p for p in (DOCS / "course").glob("*.md") if LANGUAGE not in p.name))
ORIGINALS = (DOCS / "CUSTOM_KERNEL_QUICKSTART.md", COURSE, *CHAPTERS)


def translation(original: Path) -> Path:
    return original.with_suffix(f".{LANGUAGE}.md")


def fences(document: str) -> list[tuple[str, str]]:
    """(info string, text) of every block."""
    lines = document.splitlines()
    return [(lines[block.line - 1], block.text) for block in blocks(document)]


def with_blocks_of(original: str, translated: str) -> str:
    """The translation with the original's blocks.

    Raises:
        ValueError: it has another number of them.
    """
    mine, theirs = blocks(translated), blocks(original)
    if len(mine) != len(theirs):
        raise ValueError(f"expected {len(theirs)} code blocks as in the original, not {len(mine)}")
    pieces, end = [], 0
    for block, (info, text) in zip(mine, fences(original)):
        opening = translated.rindex("\n", 0, block.start - 1) + 1
        pieces += [translated[end:opening], info + "\n", text]
        end = block.end
    return "".join(pieces) + translated[end:]


def main() -> None:
    for original in ORIGINALS:
        path = translation(original)
        path.write_text(with_blocks_of(original.read_text(), path.read_text()))


if __name__ == "__main__":
    main()
