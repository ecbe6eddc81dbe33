"""The tests of attention that run on small shapes in Triton's interpreter, in one process of their own."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.interpreter import check_interpreted
from tests.kernels.triton.common import keep_what_runs_here

HERE = Path(__file__).parent
FILES = [
    HERE / f"test_{name}.py" for name in ("decode", "decode_projected", "decode_shared", "prefill", "attention_out")
]


def test_in_the_interpreter():
    check_interpreted(*FILES, "-m", "not slow")


keep_what_runs_here(globals())
