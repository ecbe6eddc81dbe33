"""Runs llama.cpp's tests of its server against this server.

git clone https://github.com/ggml-org/llama.cpp; pip install requests openai
python -m benchmarks.serving.llama_cpp_tests llama.cpp unit/test_chat_completion.py --model MODEL

The tests start a server through `ServerProcess` in their `utils.py`, which runs a program with options of llama-server.
Here that program is this file, which translates the options and runs `nanovllm serve` with `--model`. Routes that
llama.cpp serves with and without `/v1` are asked for with it. Every name that the tests give the model is one of its
names here, since llama.cpp takes any. Arguments after the checkout go to pytest.

With --one-server all tests ask one server, which is quicker, for files whose tests need no options of their own, or the
same: --server-options "--api-key sk-this-is-the-secret-key" for unit/test_security.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.serving.server_process import ServerProcess

_MODEL, _NAMES = "NANOVLLM_TESTED_MODEL", "NANOVLLM_TESTED_NAMES"
_OPENAI_ROUTES = ("/chat/completions", "/completions", "/models", "/responses", "/messages")


def translated(given: Sequence[str]) -> list[str]:
    """Options of llama-server as options of `nanovllm serve`; those that it does not have are dropped."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("host", "port", "alias", "api-key", "cors-origins"):
        parser.add_argument(f"--{name}")
    for name, default in (("ctx-size", 512), ("parallel", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args, _ = parser.parse_known_args(given)
    options = ["--max-model-len", str(args.ctx_size // args.parallel), "--seed", str(args.seed)]
    options += ["--max-num-seqs", str(args.parallel)]
    named = {
        "--host": args.host, "--port": args.port, "--served-model-name": args.alias, "--api-key": args.api_key,
        "--cors-origin": args.cors_origins,
    }  # fmt: skip
    options += [part for name, value in named.items() if value for part in (name, value)]
    return options + [part for name in os.environ[_NAMES].split("\n") for part in ("--served-model-name", name)]


def model_names(tests: Path) -> list[str]:
    """The names that the tests give the model in requests."""
    texts = [path.read_text() for path in sorted((tests / "unit").glob("*.py"))]
    found = [name for text in texts for name in re.findall(r"""["']?model["']?\s*[:=]\s*["']([^"'/]+)["']""", text)]
    return list(dict.fromkeys(["tinyllama-2", *found]))


def serve(given: Sequence[str]) -> None:
    """Become `nanovllm serve` with options of llama-server."""
    command = [sys.executable, "-m", "nanovllm", "serve", "--model", os.environ[_MODEL], *translated(given)]
    os.execv(sys.executable, command)


def _load_utils(tests: Path) -> Any:
    """Their `utils.py`, which fetches no models here."""
    sys.modules["wget"] = ModuleType("wget")
    spec = importlib.util.spec_from_file_location("utils", tests / "utils.py")
    assert spec is not None and spec.loader is not None
    utils: Any = importlib.util.module_from_spec(spec)
    sys.modules["utils"] = utils
    spec.loader.exec_module(utils)
    make_url = utils.ServerProcess.make_url

    def with_version(self: Any, path: str, *args: Any) -> str:
        return make_url(self, f"/v1{path}" if path.startswith(_OPENAI_ROUTES) else path, *args)

    utils.ServerProcess.make_url = with_version
    return utils


def _plugin(utils: Any) -> ModuleType:
    """Ends the servers of each test, as their conftest.py does."""
    import pytest

    @pytest.fixture(autouse=True)
    def servers_end() -> Iterator[None]:
        yield
        for server in set(utils.server_instances):
            server.stop()

    plugin: Any = ModuleType("servers_end")
    plugin.servers_end = servers_end
    return plugin


def main() -> int:
    if sys.argv[1:2] == ["--as-llama-server"]:
        serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--model", help="by default the embedded SmolLM2")
    parser.add_argument("--one-server", action="store_true", help="one server for all tests, with options of its own")
    parser.add_argument("--server-options", default="", help="more options of llama-server for the one server")
    args, pytest_args = parser.parse_known_args()
    import pytest

    from nanovllm.weights.demo_model import demo_model_path

    tests = args.checkout / "tools" / "server" / "tests"
    if not (tests / "utils.py").exists():
        parser.error(f"{args.checkout}: holds no tools/server/tests/utils.py; pass a checkout of llama.cpp")
    os.environ[_MODEL] = str(Path(args.model or demo_model_path()).resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.environ[_NAMES] = "\n".join(model_names(tests))
    program = Path(os.environ.get("TMPDIR", "/tmp")) / f"llama-server-{os.getpid()}"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {__spec__.name} --as-llama-server "$@"\n')
    program.chmod(0o700)
    os.environ["LLAMA_SERVER_BIN_PATH"] = str(program)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server is ended
    server = None
    if args.one_server:
        log = Path(f"{program}.log")
        given = ["--ctx-size", "2048", "--parallel", "4", "--seed", "42", *shlex.split(args.server_options)]
        options = ["--port", "{port}", *translated(given)]
        command = [sys.executable, "-m", "nanovllm", "serve", "--model", os.environ[_MODEL], *options]
        server = ServerProcess("nanovllm serve", command, os.environ, log)
        print(f"ready after {server.wait(300):.0f} s, its log is {log}", flush=True)
        os.environ |= {"DEBUG_EXTERNAL": "1", "PORT": str(server.port)}
    os.chdir(tests)
    try:
        plugins = [_plugin(_load_utils(tests))]
        return pytest.main(["--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", *pytest_args], plugins)
    finally:
        program.unlink()
        if server is not None:
            server.close()


if __name__ == "__main__":
    sys.exit(main())
