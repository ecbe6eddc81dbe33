"""docs/check.py finds pages and sentences that are too long and links that lead nowhere; the pages are in order."""

import runpy

import pytest

from tests.docs.runnable_markdown import REPOSITORY

CHECK = runpy.run_path(str(REPOSITORY / "docs" / "check.py"))


def test_the_pages_are_in_order():
    assert list(CHECK["problems"]()) == []


@pytest.mark.parametrize(
    "page, text, said",
    [
        ("docs/page.md", "a line\n\n" * 80, "docs/page.md: 160 lines, at most 150"),
        ("README.md", "a line\n\n" * 60, "README.md: 120 lines, at most 100"),
        ("docs/page.md", "Short. " + "word " * 41 + ".", "docs/page.md:1: a sentence of 42 words"),
        ("docs/page.md", "| a |\n|---|\n| " + "word " * 41 + "|", "docs/page.md:3: a sentence of 41 words"),
        ("docs/page.md", "[x](nowhere.md)", "docs/page.md: the link to nowhere.md leads nowhere"),
        ("docs/page.md", "# A page\n\n[x](#a-page) [y](#another)", "this page has no heading for #another"),
        ("docs/page.md", "![x](nothing.svg)", "the link to nothing.svg leads nowhere"),
    ],
)
def test_what_it_finds(tmp_path, page, text, said):
    path = tmp_path / page
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (problem,) = CHECK["problems"](tmp_path)
    assert said in problem


def test_a_page_that_the_site_does_not_show(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("shown", "hidden"):
        (tmp_path / "docs" / f"{name}.md").write_text("text")
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - shown.md\n")
    assert list(CHECK["problems"](tmp_path)) == ["docs/hidden.md: it is not in the navigation of mkdocs.yml"]


def test_what_it_passes(tmp_path):
    (tmp_path / "docs" / "log").mkdir(parents=True)
    (tmp_path / "docs" / "log" / "page.md").write_text("word " * 50 + "\n\n" + "a line\n\n" * 100)
    (tmp_path / "docs" / "page.md").write_text("```python\n" + "word " * 50 + "\n```\n" + ("word " * 30 + ". ") * 3)
    assert list(CHECK["problems"](tmp_path)) == []
