"""docs/CUSTOM_KERNEL_QUICKSTART.md does what it says: every block is run, and every line that it shows is printed."""

import pytest

from tests.commands import run_here
from tests.docs.runnable_markdown import NEEDS, Workplace, blocks, check, missing_line
from tests.docs.update import QUICKSTART


@pytest.mark.slow
def test_every_block(tmp_path, warm_python):
    """If a new output is right: python -m tests.docs.update."""
    check(QUICKSTART, Workplace(tmp_path / "work", NEEDS, warm_python))


def test_what_the_document_has_to_have():
    document = blocks(QUICKSTART.read_text())
    assert {"my_kernels.py", "my_op.py", "my_cuda.py", "run.py"} <= {b.file for b in document if b.file}
    commands = [c for b in document if b.language == "console" for c, _ in b.commands()]
    for wanted in ("list", "why", "verify", "bench"):
        assert any(f"kernels {wanted}" in c for c in commands), wanted
    assert any("nanovllm generate" in c and "--kernel-plugin" in c for c in commands)
    assert any("load_inline" in b.text and "gpu" in b.words for b in document)


def test_the_script_without_a_model_says_what_is_missing(tmp_path):
    (script,) = [b for b in blocks(QUICKSTART.read_text()) if b.file == "run.py"]
    (tmp_path / "run.py").write_text(script.text)
    for arguments in ([], ["a", "b"]):
        done = run_here(*arguments, script=str(tmp_path / "run.py"))
        assert done.returncode == "usage: python run.py MODEL, such as ./small-qwen3"  # as `sys.exit` takes it


@pytest.mark.slow
def test_the_script_finds_a_kernel_that_returns_zeros(tmp_path, monkeypatch):
    for block in blocks(QUICKSTART.read_text()):
        if block.file in ("run.py", "small-qwen3/config.json"):
            (tmp_path / block.file).parent.mkdir(exist_ok=True)
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_kernels.py").write_text(
        "import torch\nfrom nanovllm.kernels import silu_and_mul\n"
        "@silu_and_mul.provider('mine')\n"
        "def zeros(gate_up: torch.Tensor) -> torch.Tensor:\n"
        "    return torch.zeros_like(gate_up.chunk(2, -1)[0])\n"
    )
    done = run_here("./small-qwen3", script=str(tmp_path / "run.py"))
    assert "mine    silu_and_mul" in done.stdout and " instead of [[" in str(done.returncode)


def test_comparison_sees_a_difference():
    printed = "┃ op ┃ rank ┃\n│ rms_norm │ 1 │ 63 │ 0.66 │\nends\n"
    assert missing_line(["rms_norm  1  70  0.5", "ends"], printed) is None
    assert missing_line(["rms_norm  2  70  0.5"], printed) == "rms_norm  2  70  0.5"
    assert missing_line(["ends", "op rank"], printed) == "op rank"
