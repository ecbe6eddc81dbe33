"""The tests with the marker `triton` in Triton's interpreter, which is chosen when Triton is imported: in processes of
their own.
"""

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.interpreter import check_interpreted

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="the tests run in this process"
)
HERE = Path(__file__)
FILES = sorted(path for path in HERE.parent.rglob("test_*.py") if "mark.triton" in path.read_text() and path != HERE)


def test_those_of_make_test():
    check_interpreted(*FILES, "-m", "triton and not slow and not gpu")


@pytest.mark.slow
def test_slow_ones():
    files = [path for path in FILES if "mark.slow" in path.read_text()]
    check_interpreted(*files, "-m", "triton and slow and not gpu")
