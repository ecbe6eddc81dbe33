"""While PyTorch is imported, which takes seconds, a terminal shows what the program does."""

import os
import re
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAN = "plan gemm --m 64 --n 64 --k 64 --gpu h100"
COMMANDS = [
    "generate Hello", "chat", "serve", "kernels list", "kernels why rms_norm", "kernels show rms_norm",
    "kernels verify rms_norm", "kernels bench rms_norm", "kernels export rms_norm", "kernels import here",
    PLAN, "fuse --preset qwen3-0.6b", "tune linear", "lab softmax", "device",
]  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal is wanted")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_something_before_pytorch_is_imported(command, tmp_path):
    (tmp_path / "torch.py").write_text("import os\nos.write(2, b'torch begins')\nos._exit(0)\n")
    before, imported, _ = shown_on_a_terminal(["-m", "nanovllm", *command.split()], tmp_path).partition(b"torch begins")
    assert imported and b" ..." in before, before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a thread counts the seconds")
@pytest.mark.parametrize("program, end", [
    (["-m", "nanovllm", "kernels", "list"], "os._exit(0)"), ([str(ROOT / "example.py")], "os.kill(os.getpid(), 9)"),
])  # fmt: skip
def test_the_seconds_go_on_while_pytorch_holds_the_lock_of_the_interpreter(program, end, tmp_path):
    """As it does while its libraries are mapped. The end of the program ends the process that counts."""
    (tmp_path / "torch.py").write_text(f"import ctypes, os\nctypes.PyDLL(None).sleep(5)\n{end}\n")
    shown = shown_on_a_terminal(program, tmp_path)
    assert len(set(re.findall(rb" \.\.\. (\d) s", shown))) >= 2, shown


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a thread counts the seconds")
def test_the_process_that_counts_ends_with_the_line(tmp_path):
    (tmp_path / "torch.py").write_text("import ctypes\nctypes.PyDLL(None).sleep(4)\n")
    program = """
import os, time
from nanovllm.console import import_torch
import_torch()
time.sleep(1.5)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""
    shown = shown_on_a_terminal(["-c", program], tmp_path)
    assert b" ... 3 s" in shown
    assert shown.endswith(b"\r\x1b[2Kno child is left\r\n"), shown


def shown_on_a_terminal(arguments, folder):
    """What Python shows on a terminal with its modules from `folder`, until the last process that writes to it ends."""
    terminal, end = os.openpty()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=end, stderr=end,
                               env=environment, cwd=folder)  # fmt: skip
    os.close(end)
    shown = b""
    with suppress(OSError):  # on Linux, the end of a terminal without a writer; elsewhere nothing is read
        while piece := os.read(terminal, 4096) if select.select([terminal], [], [], 60)[0] else None:
            shown += piece
        assert piece is not None, "a process has not ended"
    os.close(terminal)
    process.wait(60)
    return shown
