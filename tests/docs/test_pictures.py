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


def test_the_speed_chart_shows_the_newest_kept_run(script, drawn):
    date, rate = script["kept_rates"]("nanovllm", "qwen3-0.6b", "bs1")[-1]
    shown = texts(drawn / "speed.svg")
    assert f"{rate:,.0f}" in shown and any(date[:10] <= text[-11:-1] for text in shown if "kept runs" in text)
