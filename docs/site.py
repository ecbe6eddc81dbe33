"""Hooks of `make docs`: pages from the repository's root, links that leave docs/, and what the search shows first."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File in the repository's root -> page of the site."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SEARCH_WORKER = "https://unpkg.com/iframe-worker/shim"
_FENCE = re.compile(r"^```(\w+) [^`\n]*$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie in the repository's root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between the root and docs/ become links of the site; links to source files become plain text."""
    if page.file.src_uri.startswith("log/"):
        page.meta["search"] = {"boost": 0.5}  # what is true now comes before what was tried
    root_pages = {page: source for source, page in PAGES.items()}
    source = root_pages.get(page.file.src_uri)
    here = PurePosixPath(source if source else f"docs/{page.file.src_uri}").parent

    def moved(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (ROOT / here / target).resolve().relative_to(ROOT).as_posix()
        if path in PAGES:
            path = f"docs/{PAGES[path]}"
        if not path.startswith("docs/"):
            return text
        depth = len(PurePosixPath(page.file.src_uri).parts) - 1
        return f"[{text}]({'../' * depth}{path.removeprefix('docs/')}{anchor})"

    # The words after a block's language are for the tests that run it.
    return _LINK.sub(moved, _FENCE.sub(r"```\1", markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The script that lets the search run from the disk lies beside the pages; Chinese pages say what they are."""
    depth = len(PurePosixPath(page.file.src_uri).parts) - 1
    if page.file.src_uri.endswith(".zh-CN.md"):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output.replace(_SEARCH_WORKER, "../" * depth + "search-worker.js")


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """The page for what is not found asks no server either."""
    return output.replace(_SEARCH_WORKER, "/search-worker.js")
