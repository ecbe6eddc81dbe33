"""The Chinese documents: the same code blocks as the English ones, the same sections."""

import re

import pytest

from tests.docs.translations import ORIGINALS, fences, translation, with_blocks_of


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda p: p.stem)
def test_the_same_code_blocks(original):
    english, chinese = fences(original.read_text()), fences(translation(original).read_text())
    assert chinese == english, "python -m tests.docs.translations copies the English blocks"


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda p: p.stem)
def test_the_same_sections(original):
    def prose(path):
        return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)

    def count(pattern, path):
        return len(re.findall(pattern, prose(path), flags=re.MULTILINE))

    path = translation(original)
    for pattern in (r"^## ", r"^### ", r"^\|", r"^- \[ \]", r"^- ", r"^\d+\. "):  # headings, tables, lists
        assert count(pattern, path) == count(pattern, original), pattern
    assert len(re.findall("[\u4e00-\u9fff]", prose(path))) > 100


def test_blocks_are_put_in_place():
    english = "a\n\n```python file=x.py\nnew = 1\n```\n\nb\n\n```console\n$ new\n```\n"
    chinese = "甲\n\n```python\nold\n```\n\n乙\n\n```console gpu\n$ old\n```\n丙\n"
    assert with_blocks_of(english, chinese) == (
        "甲\n\n```python file=x.py\nnew = 1\n```\n\n乙\n\n```console\n$ new\n```\n丙\n"
    )
    with pytest.raises(ValueError, match="expected 2 code blocks as in the original, not 0"):
        with_blocks_of(english, "甲\n")
