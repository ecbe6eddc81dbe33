"""docs/CUSTOM_KERNEL_QUICKSTART.md does what it says: every block is run, and every line that it shows is printed."""

import pytest

from tests.docs.runnable_markdown import NEEDS, Block, Workplace, blocks, missing_line
from tests.docs.update import QUICKSTART

DOCUMENT = blocks(QUICKSTART.read_text())
failed: list[str] = []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("quickstart") / "work", NEEDS)


def _label(block: Block) -> str:
    return f"line {block.line}: {block.file or block.text.splitlines()[0][:60]}"


@pytest.mark.slow
@pytest.mark.parametrize("block", DOCUMENT, ids=_label)
def test_block(workplace, block):
    if failed:
        pytest.skip(f"builds on a block that failed: {failed[0]}")
    if not workplace.runs(block):
        pytest.skip("needs " + " and ".join(sorted(block.words & set(NEEDS))))
    try:
        for command, shown, printed in workplace.run(block):
            missing = missing_line(shown, printed)
            assert missing is None, (
                f"$ {command}\ndoes not print the line\n{missing}\nbut\n{printed}\n"
                "If the new output is right: python -m tests.docs.update"
            )
    except BaseException:
        failed.append(_label(block))
        raise


def test_what_the_document_has_to_have():
    files = {b.file for b in DOCUMENT if b.file}
    assert {"my_kernels.py", "my_op.py", "my_cuda.py", "run.py"} <= files
    commands = [c for b in DOCUMENT if b.language == "console" for c, _ in b.commands()]
    for wanted in (
        "kernels list",
        "kernels why",
        "kernels verify",
        "kernels bench",
        "nanovllm generate",
        "kernel-plugin",
    ):
        assert any(wanted in c for c in commands), wanted
    assert any("load_inline" in b.text and "gpu" in b.words for b in DOCUMENT)


def test_comparison_sees_a_difference():
    printed = "┃ op ┃ rank ┃\n│ rms_norm │ 1 │ 63 │ 0.66 │\nends\n"
    assert missing_line(["rms_norm  1  70  0.5", "ends"], printed) is None
    assert missing_line(["rms_norm  2  70  0.5"], printed) == "rms_norm  2  70  0.5"
    assert missing_line(["ends", "op rank"], printed) == "op rank"
