"""The sums over ranks in Triton's interpreter, in a process of their own."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.interpreter import check_interpreted


@pytest.mark.slow
def test_in_the_interpreter():
    check_interpreted(Path(__file__).parent / "test_all_reduce.py")
