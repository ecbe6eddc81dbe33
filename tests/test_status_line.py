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
def test_a_terminal_shows_something_before_pytorch_is_imported(tmp_path):
    """Of one process, which has imported Typer, each command is a fork."""
    (tmp_path / "torch.py").write_text("import os\nos.write(2, b'torch begins')\nos._exit(0)\n")
    program = """
import os, runpy, sys
import nanovllm.cli.command_group, nanovllm.cli.foreign_options, nanovllm.cli.option_records
for sys.argv in COMMANDS:
    os.write(2, b"\\ncommand: ")
    if not os.fork():
        runpy.run_module("nanovllm", run_name="__main__")
        os._exit(1)
    os.wait()
""".replace("COMMANDS", repr([["nanovllm", *command.split()] for command in COMMANDS]))
    shown, of_bench = shown_on_terminals([["-c", program], [str(ROOT / "bench.py")]], tmp_path, tmp_path)
    assert of_bench.startswith(b"\r\x1b[2Kstarting ...") and of_bench.endswith(b"torch begins"), of_bench
    for command, one in zip(COMMANDS, shown.split(b"command: ")[1:], strict=True):
        before, imported, _ = one.partition(b"torch begins")
        assert imported and b" ..." in before, (command, before)


CLEARED = """
import os, time
from nanovllm.console import import_torch
import_torch()
time.sleep(1.5)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child is left")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a thread counts the seconds")
def test_the_seconds_go_on_while_pytorch_holds_the_lock_of_the_interpreter(tmp_path):
    """As it does while its libraries are mapped. The process that counts ends with the line, or with the program."""
    programs = {
        "os._exit(0)": ["-m", "nanovllm", "kernels", "list"],
        "os.kill(os.getpid(), 9)": [str(ROOT / "example.py")],
        "": ["-c", CLEARED],
    }  # fmt: skip
    folders = [tmp_path / str(number) for number in range(len(programs))]
    for folder, end in zip(folders, programs):
        folder.mkdir()
        (folder / "torch.py").write_text(f"import ctypes, os\nctypes.PyDLL(None).sleep(7)\n{end}\n")
    shown = shown_on_terminals(programs.values(), *folders)
    for one in shown:
        assert len(set(re.findall(rb" \.\.\. (\d) s", one))) >= 2, one
    assert shown[-1].endswith(b"\r\x1b[2Kno child is left\r\n"), shown[-1]


def shown_on_terminals(programs, *folders):
    """What Python shows of each program, side by side, each on a terminal with its modules from a folder, until the
    last process that writes to it ends.
    """
    started = []
    for arguments, folder in zip(programs, folders):
        terminal, end = os.openpty()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
        process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=end, stderr=end,
                                   env=environment, cwd=folder)  # fmt: skip
        os.close(end)
        started.append((process, terminal))
    return [all_of(process, terminal) for process, terminal in started]


def all_of(process, terminal):
    shown = b""
    with suppress(OSError):  # on Linux, the end of a terminal without a writer; elsewhere nothing is read
        while piece := os.read(terminal, 4096) if select.select([terminal], [], [], 300)[0] else None:
            shown += piece
        assert piece is not None, "a process has not ended"
    os.close(terminal)
    process.wait(300)
    return shown
