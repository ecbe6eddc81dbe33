"""docs/adapters.md: its Python runs as it stands, and names ops and options that are there."""

import os
import re
import subprocess
import sys

import pytest

from nanovllm.adapters.inductor import OPS
from nanovllm.adapters.vllm import ALL_OPS as IN_VLLM
from tests.docs.runnable_markdown import REPOSITORY

PAGE = (REPOSITORY / "docs" / "adapters.md").read_text()


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.slow
def test_the_code_of_torch_compile_runs():
    code = re.search(r"```python\n(.*?)```", section("torch.compile"), re.DOTALL)[1]
    # On a CPU, also where there is a GPU: the page shows what is printed there.
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=without_gpu)
    assert done.returncode == 0, done.stderr
    shown = re.search(r"On a CPU the report says `(.*?)`", section("torch.compile"))[1]
    # Inductor's cache may have the graph of an earlier run, which is not given to the pass.
    assert shown in done.stdout or "graphs compiled: 0" in done.stdout, done.stdout


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
