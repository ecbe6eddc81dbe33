"""Runs the code blocks of a Markdown document, in order, and compares what commands print with what the document shows.

The info string of a block says what it is:

    ```python file=my_kernels.py    written to that file (any language); `gpu` after it: only where there are a GPU,
    nvcc and ninja ```python                       run as a script
    ```console                      lines that begin with "$ " are run; the lines below each are what it prints
    ```console gpu                  the same, only where there are a GPU, nvcc and ninja
    ```console fails                the last command must fail
    ```console model                needs the default model
    ```text                         prose; the only kind that is not run

Every line shown must be printed, in that order; longer numbers may differ, and lines that are printed and not shown are
no matter.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.warm_python import WarmPython

REPOSITORY = Path(__file__).resolve().parents[2]
SHOWN_DIRECTORY = "~/my-kernel"  # stands for the directory that the commands run in
_BLOCK = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# As pip writes it.
CONSOLE_SCRIPT = "from nanovllm.__main__ import main\nif __name__ == '__main__':\n    main()\n"
_EXPORT = re.compile(r"export (\w+)=(\S+)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `start` and `end` are where its text lies in the document."""

    language: str
    words: frozenset[str]
    text: str
    line: int
    start: int
    end: int

    @property
    def file(self) -> str | None:
        return next((w.removeprefix("file=") for w in self.words if w.startswith("file=")), None)

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """(command, the lines shown below it)."""
        command: str | None = None
        shown: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                if command is not None:
                    yield command, shown
                command, shown = line[2:], []
            else:
                assert command is not None, f"line {self.line}: output before the first command"
                shown.append(line)
        if command is not None:
            yield command, shown


def blocks(document: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(document):
        language, *words = match["info"].split() or [""]
        line = document.count("\n", 0, match.start()) + 1
        found.append(Block(language, frozenset(words), match["text"], line, match.start("text"), match.end("text")))
    return found


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first line shown that is not printed after those before it, or None."""
    lines = iter([_normal(line) for line in printed.splitlines()])
    for line in shown:
        wanted = _normal(line)
        if any(c.isalnum() for c in wanted) and wanted not in lines:  # consumes `lines` up to the one found
            return line
    return None


def _normal(line: str) -> str:
    """A line without a table's frame; numbers of more than one digit, which depend on the machine, as "#"."""
    line = re.sub(r"[\u2500-\u257f|]", " ", line)
    line = re.sub(r"\d[\d,]*\.\d+(e[+-]?\d+)?|\d[\d,]+", "#", line)
    return " ".join(line.split())


class Workplace:
    """A directory in which a document's blocks run one after the other, sharing files and exported variables."""

    def __init__(self, directory: Path, has: Mapping[str, Callable[[], bool]], python: WarmPython) -> None:
        """has: whether there is what the words "gpu" and "model" stand for."""
        self._directory, self._has = directory, has
        programs = directory.parent / f"{directory.name}-bin"
        for path in (directory, programs):
            path.mkdir(parents=True, exist_ok=True)
        script = directory.parent / f"{directory.name}-script.py"
        script.write_text(CONSOLE_SCRIPT)
        python.program(programs / "nanovllm", str(script))
        python.program(programs / "python")
        self._python = python.path
        unset = ("TRITON_INTERPRET", "NANOVLLM_KERNELS", "NANOVLLM_KERNEL_TABLES")
        self._environment = {k: v for k, v in os.environ.items() if k not in unset}
        self._environment |= {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        }

    def runs(self, block: Block) -> bool:
        return all(there() for word, there in self._has.items() if word in block.words)

    def run(self, block: Block) -> list[tuple[str, list[str], str]]:
        """Run a block: (command, lines shown, what was printed) of each command. AssertionError if one fails."""
        where = f"line {block.line}"
        if block.file is not None:
            path = self._directory / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            return []
        if block.language == "python":
            done = self._call([self._python, "-"], block, input=block.text)
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
            return [("python", [], done.stdout)]
        assert block.language in ("console", "text"), (
            f"{where}: {block.language!r} is not a kind of block that is tested"
        )
        results = []
        commands = list(block.commands()) if block.language == "console" else []
        for i, (command, shown) in enumerate(commands):
            if (export := _EXPORT.fullmatch(command)) is not None:
                self._environment[export[1]] = export[2]
                continue
            done = self._call(["bash", "-o", "pipefail", "-c", command], block)
            printed = (done.stderr + "\n" + done.stdout).replace(str(self._directory), SHOWN_DIRECTORY)
            fails = "fails" in block.words and i == len(commands) - 1
            assert (done.returncode != 0) == fails, f"{where}: $ {command}: exit status {done.returncode}\n{printed}"
            results.append((command, shown, printed))
        return results

    def _call(self, command: list[str], block: Block, input: str | None = None) -> subprocess.CompletedProcess:
        environment = dict(self._environment)
        if "gpu" in block.words:
            environment.pop("TRITON_INTERPRET", None)
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # the same everywhere: what the document shows is from a CPU
        return subprocess.run(
            command, cwd=self._directory, env=environment, input=input, capture_output=True, text=True, timeout=600
        )


def check(page: Path, place: Workplace, outputs: bool = True) -> None:
    """Run the blocks of a page in order, but for those that need what this machine lacks.

    Args:
        outputs: compare what commands print with what the page shows.

    Raises:
        AssertionError: a block fails, nothing ran, or a command does not print a line that is shown.
    """
    runnable = [block for block in blocks(page.read_text()) if place.runs(block)]
    assert runnable, f"{page.name}: nothing of it runs here"
    for block in runnable:
        for command, shown, printed in place.run(block):
            missing = missing_line(shown, printed) if outputs else None
            where = f"{page.name}, line {block.line}: $ {command}"
            assert missing is None, f"{where}\ndoes not print the line\n{missing}\nbut\n{printed}"


def gpu_and_nvcc() -> bool:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    return torch.cuda.is_available() and CUDA_HOME is not None and is_ninja_available()


def embedded_model() -> bool:
    from nanovllm.weights.demo_model import DemoModelError, demo_model_path

    try:
        return demo_model_path(download=False).is_file()
    except DemoModelError:
        return False


NEEDS: Mapping[str, Callable[[], bool]] = {"gpu": gpu_and_nvcc, "model": embedded_model}
