"""The pictures of the docs show what is kept in results/, and the files are those that the script draws today."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")
DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def texts(path):
    return [node.text.strip() for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text") if node.text]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DIRECTORY / "draw.py"))


@pytest.fixture(scope="module")
def drawn(script, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    script["main"](directory)
    return directory


@pytest.mark.parametrize("name", sorted(path.name for path in DIRECTORY.glob("*.svg")))
def test_the_picture_is_what_the_script_draws(name, drawn):
    assert texts(drawn / name) and texts(DIRECTORY / name) == texts(drawn / name), "run `make pictures`"


def test_every_picture_is_kept(script):
    assert {f"{name}.svg" for name in script["PICTURES"]} == {path.name for path in DIRECTORY.glob("*.svg")}


def test_the_speed_chart_is_one_run_the_newest_with_every_engine(script, drawn):
    date, rows = script["newest_run"]("qwen3-0.6b")
    shown = texts(drawn / "speed.svg")
    assert any(f"(one run, {date[:10]})" in text for text in shown) and len(rows) == 15
    assert all(f"{script['median_rate'](row):,.0f}" in shown for row in rows.values())


def test_the_pages_have_the_rates_of_the_speed_chart(script):
    rows = script["newest_run"]("qwen3-0.6b")[1]
    docs = DIRECTORY.parent
    for page, engines in (
        (docs.parent / "README.md", script["ENGINES"]),
        (docs / "performance.md", ("nanovllm", "vllm")),
    ):
        text = page.read_text()
        for (workload, engine), row in rows.items():
            if engine in engines:
                line = next(line for line in text.splitlines() if line.startswith(f"| {workload}:"))
                assert f" {script['median_rate'](row):,.0f} " in line, (page.name, workload, engine)
