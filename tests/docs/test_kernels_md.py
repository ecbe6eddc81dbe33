"""docs/kernels.md: its table is what the command prints, and it names everything that it should."""

import re

from tests.docs.runnable_markdown import NEEDS, Workplace, blocks
from tests.docs.update import KERNELS, embedded_table, printed_table

DOCUMENT = KERNELS.read_text()


def test_the_table_is_what_the_command_prints():
    assert embedded_table(DOCUMENT) == printed_table(), "run python -m tests.docs.update"


def test_its_code_runs(tmp_path):
    place = Workplace(tmp_path / "work", NEEDS)
    ran = [place.run(block) for block in blocks(DOCUMENT) if place.runs(block)]
    assert ran


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", DOCUMENT)
    assert links and all((KERNELS.parent / link).exists() for link in links if "://" not in link)
