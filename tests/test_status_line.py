"""While PyTorch is imported, which takes seconds, a terminal shows what the program does."""

import os
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
    terminal, end = os.openpty()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    process = subprocess.Popen([sys.executable, "-m", "nanovllm", *command.split()], stdin=subprocess.DEVNULL,
                               stdout=end, stderr=end, env=environment, cwd=tmp_path)  # fmt: skip
    os.close(end)
    shown = b""
    with suppress(OSError):  # the end of a terminal without a writer
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    process.wait(60)
    before, imported, _ = shown.partition(b"torch begins")
    assert imported and b" ..." in before, shown
