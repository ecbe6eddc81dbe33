"""Runs the console command and the scripts at the root, as a user does."""

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

from nanovllm.cli import main
from nanovllm.kernels.op.registry import temporary

ROOT = Path(__file__).resolve().parents[1]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "nanovllm", *args], capture_output=True, text=True, timeout=600)


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    def isatty(self) -> bool:
        return True


def run_here(*args: str, script: str | None = None, terminal: bool = False) -> subprocess.CompletedProcess:
    """As `run`, or the script at the root, but for the start of a process, which takes seconds. No plugin stays."""
    stream = Terminal if terminal else io.StringIO
    before, streams = sys.argv, (stream(), stream())
    sys.argv, code = [script or "nanovllm", *args], 0
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), temporary():
            runpy.run_path(str(ROOT / script), run_name="__main__") if script else main()
    except SystemExit as e:
        code = e.code or 0
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(args, code, *(stream.getvalue() for stream in streams))
