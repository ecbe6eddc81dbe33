"""docs/adapters.md: its Python runs as it stands, and names ops and options that are there."""

import re

import pytest

from nanovllm.adapters.inductor import OPS
from nanovllm.adapters.vllm import ALL_OPS as IN_VLLM
from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Workplace, blocks

PAGE = (REPOSITORY / "docs" / "adapters.md").read_text()


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.slow
def test_its_code_runs(tmp_path, warm_python):
    place = Workplace(tmp_path / "work", NEEDS, warm_python)
    printed = "".join(text for block in blocks(PAGE) if place.runs(block) for *_, text in place.run(block))
    shown = re.search(r"On a CPU the report says `(.*?)`", section("torch.compile"))[1]
    # Inductor's cache may have the graph of an earlier run, which is not given to the pass.
    assert shown in printed or "graphs compiled: 0" in printed, printed


def test_the_tables_name_every_op():
    for title, ops in (("torch.compile", OPS), ("vLLM", IN_VLLM)):
        rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
        assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(ops)


def test_the_commands_are_there():
    from typer.testing import CliRunner

    from nanovllm.cli import app

    page = section("FlashInfer-Bench")
    for command, options in (("export", "--dtype --shape --provider"), ("import", "--timeout --save --only")):
        words = CliRunner().invoke(app, ["kernels", command, "--help"]).output.split()
        assert f"nanovllm kernels {command} " in page
        assert all(option in words and option in page for option in options.split())
