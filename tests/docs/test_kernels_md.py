"""The pages of reference: the table of ops is what the command prints, and the code runs."""

import pytest

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Workplace, blocks
from tests.docs.update import KERNELS, embedded_table, printed_table


def test_the_table_is_what_the_command_prints():
    assert embedded_table(KERNELS.read_text()) == printed_table(), "run python -m tests.docs.update"


SLOW = ("attention-provider", "models", "fast-paths", "serving", "adapters")


@pytest.mark.parametrize("page", ["kernels", *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW)])
def test_its_code_runs(page, tmp_path):
    place = Workplace(tmp_path / "work", NEEDS)
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    ran = [place.run(block) for block in blocks(text) if place.runs(block)]
    assert ran
