"""docs/fusion.md does what it says: every block is run."""

import pytest

from tests.docs.runnable_markdown import REPOSITORY, Workplace, blocks, missing_line

DOCUMENT = blocks((REPOSITORY / "docs" / "fusion.md").read_text())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("fusion") / "work", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [b for b in DOCUMENT if b.language != "text" and b.language], ids=lambda b: f"line {b.line}"
)
def test_block(workplace, block):
    for command, shown, printed in workplace.run(block):
        missing = missing_line(shown, printed)
        assert missing is None, f"$ {command}\ndoes not print the line\n{missing}\nbut\n{printed}"
