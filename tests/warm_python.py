"""Programs in processes of their own that need not import PyTorch anew, which takes two seconds of each.

A server imports PyTorch and forks for each call. A client, which imports next to nothing, stands for Python on the
command line: it hands over its arguments, directory, environment and streams, and waits for the end. A test that
signals a program, or is about its start, needs Python itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_CLIENT = """#!{python} -IS
import json, os, socket, sys
call = {{"arguments": {first} + sys.argv[1:], "directory": os.getcwd(), "environment": dict(os.environ)}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps(call).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or 1))
"""


class WarmPython:
    """A server that runs. `path`: a program that stands for Python."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.path = str(self.program(socket.with_name("python")))

    def program(self, file: Path, *first: str) -> Path:
        """file, as a program that calls Python with the arguments `first` and its own."""
        file.write_text(_CLIENT.format(python=sys.executable, path=str(self._socket), first=list(first)))
        file.chmod(0o755)
        return file

    def run(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess:
        """As `subprocess.run` of Python with these arguments; what is printed is kept as text."""
        return subprocess.run([self.path, *arguments], capture_output=True, text=True, **options)


@contextlib.contextmanager
def started() -> Iterator[WarmPython]:
    """A server while the block runs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory(prefix="warm") as directory:
        path = Path(directory) / "socket"
        command = [sys.executable, "-m", "tests.warm_python", str(path)]
        with subprocess.Popen(command, env=environment, **pipes) as server:
            assert server.stdout.readline() == "ready\n"
            yield WarmPython(path)
            server.stdin.close()


def serve(path: str) -> None:
    """Run calls until the standard input ends."""
    import torch  # noqa: F401

    import nanovllm.cli
    import nanovllm.kernels  # noqa: F401

    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _answer(connection)
            with contextlib.suppress(ChildProcessError):  # of those that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket) -> None:
    """Run the call in a process below this one, which says how the program ended."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    call = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    if program := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        connection.sendall(str(status if status >= 0 else 128 - status).encode())  # as a shell has it
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(call["environment"])
    os.chdir(call["directory"])
    status = 0
    try:
        _run(*call["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take PyTorch apart takes as long as to import it


def _run(what: str, *arguments: str) -> None:
    """As `python WHAT ARGUMENTS` does."""
    packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [package for package in packages if package and package not in sys.path]
    if what == "-m":
        sys.argv, sys.path[0] = [what, *arguments[1:]], os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif what in ("-", "-c"):
        sys.path[0] = ""
        sys.argv, text = (
            ([what, *arguments], sys.stdin.read()) if what == "-" else ([what, *arguments[1:]], arguments[0])
        )
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [what, *arguments], os.path.dirname(os.path.abspath(what))
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
