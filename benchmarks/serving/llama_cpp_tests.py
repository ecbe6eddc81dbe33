"""Runs llama.cpp's tests of its server against this server.

git clone https://github.com/ggml-org/llama.cpp; pip install requests openai
python -m benchmarks.serving.llama_cpp_tests llama.cpp unit/test_chat_completion.py --model MODEL

The tests start a server through `ServerProcess` in their `utils.py`, which runs a program with options of llama-server.
Here that program is this file, which translates the options and runs `nanovllm serve` with `--model`. Routes that
llama.cpp serves with and without `/v1` are asked for with it. Arguments after the checkout go to pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MODEL = "NANOVLLM_TESTED_MODEL"
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
    return options + [part for name, value in named.items() if value for part in (name, value)]


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
    args, pytest_args = parser.parse_known_args()
    import pytest

    from nanovllm.weights.demo_model import demo_model_path

    tests = args.checkout / "tools" / "server" / "tests"
    if not (tests / "utils.py").exists():
        parser.error(f"{args.checkout}: holds no tools/server/tests/utils.py; pass a checkout of llama.cpp")
    os.environ[_MODEL] = str(Path(args.model or demo_model_path()).resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    program = Path(os.environ.get("TMPDIR", "/tmp")) / f"llama-server-{os.getpid()}"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {__spec__.name} --as-llama-server "$@"\n')
    program.chmod(0o700)
    os.environ["LLAMA_SERVER_BIN_PATH"] = str(program)
    os.chdir(tests)
    try:
        plugins = [_plugin(_load_utils(tests))]
        return pytest.main(["--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", *pytest_args], plugins)
    finally:
        program.unlink()


if __name__ == "__main__":
    sys.exit(main())
