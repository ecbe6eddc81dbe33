"""The course does what it says: every block of its chapters runs, in order; CUDA C++ is compiled if nvcc is here."""

import re
import shutil

import pytest

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Block, Workplace, blocks, missing_line
from tests.docs.translations import CHAPTERS, COURSE

pytestmark = pytest.mark.slow
BLOCKS = [(chapter.stem, block) for chapter in CHAPTERS for block in blocks(chapter.read_text())]
WITH_NVCC = {**NEEDS, "nvcc": lambda: shutil.which("nvcc") is not None}
failed: list[str] = []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("guide") / "work", WITH_NVCC)


def _label(chapter: str, block: Block) -> str:
    return f"{chapter} line {block.line}: {block.file or block.text.splitlines()[0][:60]}"


@pytest.mark.parametrize(
    "chapter, block", [pytest.param(c, b, id=_label(c, b)) for c, b in BLOCKS if b.language != "text"]
)
def test_block(workplace, chapter, block):
    if failed and not block.file:
        pytest.skip(f"may build on a block that failed: {failed[0]}")
    if not workplace.runs(block):
        pytest.skip("needs " + " and ".join(sorted(block.words & set(WITH_NVCC))))
    try:
        for command, shown, printed in workplace.run(block):
            missing = missing_line(shown, printed)
            assert missing is None, f"$ {command}\ndoes not print the line\n{missing}\nbut\n{printed}"
    except BaseException:
        failed.append(_label(chapter, block))
        raise


@pytest.mark.parametrize("page", (COURSE, *CHAPTERS), ids=lambda path: path.stem)
def test_links_and_files_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert links and all((page.parent / link).exists() for link in links)
    named = set(re.findall(r"`(nanovllm/[\w/]+(?:\.\w+)?/?)`", text))
    assert all((REPOSITORY / path).exists() for path in named), named
    assert page is COURSE or f"(course/{page.name})" in COURSE.read_text()


def test_what_the_document_has_to_have():
    text = "".join(chapter.read_text() for chapter in CHAPTERS)
    for wanted in (
        "warehouse", "arithmetic intensity", "warm-up", "synchronis", "cold", "Fusion", "Tiling", "double buffering",
        "triple",
        "Bank conflicts", "Waves", "compute-sanitizer", "CUDA_LAUNCH_BLOCKING", "interpreter", "1.2x", "Fallback",
    ):  # fmt: skip
        assert wanted in text, wanted
    files = {b.file: b.text for _, b in BLOCKS if b.file}
    assert {"rms_v1.py", "rms_v2.py", "rms_norm.cu", "rms_cuda.py"} <= set(files)
    assert "__global__" in files["rms_norm.cu"] and "rms_norm.provider" in files["rms_cuda.py"]
