"""The Python blocks of docs/getting-started.md and of README.md run, one after the other in one process."""

import pytest

from tests.docs.runnable_markdown import NEEDS, REPOSITORY, blocks


def code(path) -> str:
    return "\n".join(b.text for b in blocks(path.read_text()) if b.language == "python")


def test_their_code_runs(warm_python):
    if not NEEDS["model"]():
        pytest.skip("needs the demo model")
    guide = code(REPOSITORY / "docs" / "getting-started.md")
    assert "llm.chat(" in guide and "llm.stream(" in guide and "cache_salt" in guide
    readme = code(REPOSITORY / "README.md")
    assert '"Qwen/Qwen3-0.6B"' in readme and "max_tokens=64" in readme
    readme = readme.replace('"Qwen/Qwen3-0.6B"', "demo_model_path()").replace("max_tokens=64", "max_tokens=4")
    done = warm_python.run("-c", guide + readme, cwd=REPOSITORY, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_answer_that_they_show_is_the_examples(warm_python, monkeypatch):
    """As on a CPU, which the text says. The pages leave out the end of the answer, and so does this."""
    if not NEEDS["model"]():
        pytest.skip("needs the demo model")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = warm_python.run("example.py", "--max-tokens", "32", cwd=REPOSITORY, timeout=600)
    assert done.returncode == 0, done.stderr
    for page in ("README.md", "docs/getting-started.md"):
        question, answer = shown_answer((REPOSITORY / page).read_text())
        assert f"> {question}\n{answer}" in done.stdout, page


def shown_answer(page: str) -> tuple[str, str]:
    lines = page.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("    > "))
    return lines[at].removeprefix("    > "), lines[at + 1].strip().removesuffix(" ...")
