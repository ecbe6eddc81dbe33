"""While PyTorch is imported, which takes seconds, a terminal shows what the program does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAN = "plan gemm --m 64 --n 64 --k 64 --gpu h100 --compile"
COMMANDS = [
    "generate Hello", "chat", "serve none", "kernels list", "kernels why rms_norm", "kernels show rms_norm",
    "kernels verify rms_norm", "kernels bench rms_norm", "kernels export rms_norm here", "kernels import here",
    PLAN, "fuse --preset qwen3-0.6b", "tune linear", "lab softmax", "device",
]  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal is wanted")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_something_before_pytorch_is_imported(command, tmp_path):
    (tmp_path / "torch.py").write_text("import os\nos.write(2, b'torch begins')\nos._exit(0)\n")
    terminal, end = os.openpty()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    subprocess.run([sys.executable, "-m", "nanovllm", *command.split()], stdin=subprocess.DEVNULL, stdout=end,
                   stderr=end, env=environment, cwd=tmp_path, timeout=60, check=True)  # fmt: skip
    shown, _, _ = os.read(terminal, 65536).decode().partition("torch begins")
    os.close(terminal)
    os.close(end)
    assert _, "the command has not imported PyTorch"
    assert " ..." in shown
