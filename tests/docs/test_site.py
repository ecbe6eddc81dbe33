"""The documentation site: pages ask no server, Chinese pages say so, and a search finds Chinese words and options."""

import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).resolve().parents[2]
OUTPUT = '<html lang="en" class="no-js"><script src="https://unpkg.com/iframe-worker/shim"></script>'


@pytest.fixture(scope="module")
def hooks():
    return runpy.run_path(str(ROOT / "docs" / "site.py"))


def page(path):
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def test_no_page_asks_a_server(hooks):
    assert 'src="../search-worker.js"' in hooks["on_post_page"](OUTPUT, page=page("course/1-machine.md"))
    assert 'src="/search-worker.js"' in hooks["on_post_template"](OUTPUT, template_name="404.html")


@pytest.mark.parametrize(
    "path, language", [("course/1-machine.md", "en"), ("course/1-machine.zh-CN.md", "zh-CN"), ("index.md", "en")]
)
def test_a_page_names_its_language(hooks, path, language):
    assert f'<html lang="{language}"' in hooks["on_post_page"](OUTPUT, page=page(path))


def test_a_search_splits_chinese_sentences():
    separator = re.search(r"separator: '(.+)'", (ROOT / "mkdocs.yml").read_text())[1]
    assert [w for w in re.split(separator, "每个 warp，流水线 num_stages kernel-plugin") if w] == [
        "每", "个", "warp", "流", "水", "线", "num_stages", "kernel", "plugin",
    ]  # fmt: skip


@pytest.fixture
def site(tmp_path):
    """A site of one page, from the disk, with the scripts and hooks of this one."""
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "page.md").write_text("# A page\n\nThe option `--seed` makes sampling repeatable.\n")
    shutil.copy(ROOT / "docs" / "search-worker.js", pages)
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: site\ndocs_dir: pages\nuse_directory_urls: false\ntheme: {name: material, font: false}\n"
        f"plugins: [search, offline]\nhooks: [{ROOT / 'docs' / 'site.py'}]\n"
    )
    build(load_config(str(tmp_path / "mkdocs.yml")))
    return (tmp_path / "site" / "page.html").as_uri()


def test_a_search_finds_an_option_as_it_is_typed(site, browser):
    for query in ("seed", "--seed", "option --seed", '"--seed"'):
        page = browser.new_page()
        page.set_default_timeout(300_000)
        page.goto(site)
        page.locator(".md-search__input").click()
        page.locator(".md-search__input").press_sequentially(query)
        page.locator(".md-search-result__item", has_text="sampling repeatable").first.wait_for()


def test_a_search_shows_pages_before_the_log(hooks):
    for path, boost in (("log/cpu.md", 0.5), ("cpu.md", None)):
        shown = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})
        hooks["on_page_markdown"]("text", page=shown)
        assert shown.meta.get("search", {}).get("boost") == boost
