"""docs/structured-output.md: the code runs and prints what stands there."""

import pytest

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Workplace, blocks, missing_line

PAGE = REPOSITORY / "docs" / "structured-output.md"


@pytest.mark.slow
def test_its_code_runs(tmp_path):
    place = Workplace(tmp_path / "work", NEEDS)
    for block in blocks(PAGE.read_text()):
        if place.runs(block):
            for _, shown, printed in place.run(block):
                assert missing_line(shown, printed) is None, printed
