"""Checks the pages of the documentation: their length, the length of sentences, and that links lead somewhere.

python docs/check.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = {"README.md": 100, "docs/kernels.md": 300, "docs/attention.md": 250, "docs/adapters.md": 200}
"""Of a page; of others in docs/, `DEFAULT_LINES`."""
DEFAULT_LINES = 150
TOTAL_LINES = 3000
"""Of all pages in docs/ but the log and the course."""
MOST_WORDS = 40
"""Of a sentence."""
TUTORIALS = re.compile(r"docs/(CUSTOM_KERNEL_QUICKSTART|CUSTOM_CUDA_KERNEL_GUIDE)")
"""Long pages that are followed from the beginning to the end."""
UNCOUNTED = re.compile(r"docs/(log/|course/|CUSTOM_CUDA_KERNEL_GUIDE)")


@cache
def tokens(path: Path) -> list[Token]:
    """What a page consists of."""
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())


def too_long(name: str, num_lines: int) -> Iterator[str]:
    """What is said of a page with too many lines."""
    most = MOST_LINES.get(name, DEFAULT_LINES)
    if (
        name.startswith(("docs/log/", "docs/course/"))
        or TUTORIALS.match(name)
        or not name.startswith(("docs/", "README"))
    ):
        return
    if num_lines > most:
        yield f"{name}: {num_lines} lines, at most {most} are allowed; move what was tried and seen to docs/log/"


def sentences(inline: Token) -> Iterator[str]:
    """The sentences of a paragraph, a heading or a table's cell; code counts as one word."""
    other = {"code_inline": "code", "softbreak": " ", "hardbreak": " "}
    text = "".join(c.content if c.type == "text" else other.get(c.type, "") for c in inline.children or [])
    yield from re.split(r"(?<=[.!?])[)\"'”]*\s+", text)


def long_sentences(path: Path, name: str) -> Iterator[str]:
    for token in tokens(path):
        if token.type == "inline":
            for sentence in sentences(token):
                if len(words := sentence.split()) > MOST_WORDS:
                    line = token.map[0] + 1 if token.map else 0
                    yield f"{name}:{line}: a sentence of {len(words)} words, at most {MOST_WORDS}: {sentence[:60]}..."


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the documentation site make them."""
    page = tokens(path)
    titles = [page[i + 1].content for i, token in enumerate(page) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, name: str) -> Iterator[str]:
    for token in tokens(path):
        for child in token.children or []:
            target = str(child.attrGet("href") or child.attrGet("src") or "")
            if not target or "://" in target or target.startswith("mailto:"):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists():
                yield f"{name}: the link to {target} leads nowhere"
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                yield f"{name}: {file or 'this page'} has no heading for #{anchor}"


def not_in_navigation(path: Path, name: str, root: Path) -> Iterator[str]:
    site = root / "mkdocs.yml"
    page = name.removeprefix("docs/")
    if site.exists() and name.startswith("docs/") and not page.startswith("log/") and page not in site.read_text():
        yield f"{name}: it is not in the navigation of mkdocs.yml"


def problems(root: Path = ROOT) -> Iterator[str]:
    """Everything that is wrong with the pages below a repository's root."""
    pages = [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
    total = 0
    for path in pages:
        name = path.relative_to(root).as_posix()
        num_lines = path.read_text().count("\n")
        total += num_lines * (name.startswith("docs/") and not UNCOUNTED.match(name))
        yield from too_long(name, num_lines)
        yield from broken_links(path, name)
        yield from not_in_navigation(path, name, root)
        if "zh-CN" not in name and not name.startswith("docs/log/"):
            yield from long_sentences(path, name)
    if total > TOTAL_LINES:
        yield f"docs/ has {total} lines outside of the log and the course, at most {TOTAL_LINES} are allowed"


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "the documentation is in order")
    sys.exit(1 if found else 0)
