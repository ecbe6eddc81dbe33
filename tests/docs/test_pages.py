"""Pages of docs/: the table of ops is what the command prints, and the code runs and prints what stands there."""

import pytest

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Workplace, check
from tests.docs.update import KERNELS, embedded_table, printed_table


def test_the_table_is_what_the_command_prints(warm_python):
    assert embedded_table(KERNELS.read_text()) == printed_table(warm_python), "run python -m tests.docs.update"


RUN_ALONE = ("attention-provider", "models", "fast-paths", "serving")  # test_adapters.py runs adapters.md
COMPARED = ("structured-output", "fusion")


@pytest.mark.parametrize(
    "page", ["kernels", *(pytest.param(page, marks=pytest.mark.slow) for page in (*RUN_ALONE, *COMPARED))]
)
def test_its_code_runs(page, tmp_path, warm_python):
    check(
        REPOSITORY / "docs" / f"{page}.md", Workplace(tmp_path / "work", NEEDS, warm_python), outputs=page in COMPARED
    )
