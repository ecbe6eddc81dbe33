"""The course does what it says: every block of its chapters runs, in order; CUDA C++ is compiled if nvcc is here."""

import re
import shutil

import pytest

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, Workplace, blocks, check
from tests.docs.translations import CHAPTERS, COURSE

pytestmark = pytest.mark.slow


def test_every_block(tmp_path, warm_python):
    place = Workplace(tmp_path / "work", {**NEEDS, "nvcc": lambda: shutil.which("nvcc") is not None}, warm_python)
    for chapter in CHAPTERS:  # later ones use the files of earlier ones
        check(chapter, place)


def test_what_the_document_has_to_have():
    text, files = COURSE.read_text(), {}
    for chapter in CHAPTERS:
        assert f"(course/{chapter.name})" in text
        files |= {b.file: b.text for b in blocks(chapter.read_text()) if b.file}
    text += "".join(chapter.read_text() for chapter in CHAPTERS)
    for wanted in (
        "warehouse", "arithmetic intensity", "warm-up", "synchronis", "cold", "Fusion", "Tiling", "double buffering",
        "triple", "Bank conflicts", "Waves", "compute-sanitizer", "CUDA_LAUNCH_BLOCKING", "interpreter", "1.2x",
        "Fallback",
    ):  # fmt: skip
        assert wanted in text, wanted
    named = set(re.findall(r"`(nanovllm/[\w/]+(?:\.\w+)?/?)`", text))
    assert named and all((REPOSITORY / path).exists() for path in named), named
    assert {"rms_v1.py", "rms_v2.py", "rms_norm.cu", "rms_cuda.py"} <= set(files)
    assert "__global__" in files["rms_norm.cu"] and "rms_norm.provider" in files["rms_cuda.py"]
