"""The documentation site: pages ask no server, Chinese pages say so, and a search finds words in Chinese sentences."""

import re
import runpy
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
