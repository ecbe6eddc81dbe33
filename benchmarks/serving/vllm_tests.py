"""Runs vLLM's own tests of its OpenAI server against this server.

git clone https://github.com/vllm-project/vllm; pip install pytest-asyncio jsonschema regex requests
python -m benchmarks.serving.vllm_tests vllm tests/entrypoints/openai/completion/test_completion.py --model MODEL

The tests start a server through `tests.utils.RemoteOpenAIServer` alone. This one starts `nanovllm serve` with `--model`
under whatever name a test has, and drops options of vLLM that it does not know. Modules of vLLM are stand-ins: what a
test takes from them skips the test when it is used. Arguments after the checkout go to pytest.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


class RemoteOpenAIServer:
    """As vLLM's class of this name: a server in a `with` block."""

    DUMMY_API_KEY = "token-abc123"
    model_path = ""

    def __init__(self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any):
        self._command = [
            sys.executable, "-m", "nanovllm", "serve", "--model", self.model_path, "--served-model-name", model,
            "--port", "0", *known_options(vllm_serve_args),
        ]  # fmt: skip
        self._env = os.environ | (env_dict or {})

    def __enter__(self) -> RemoteOpenAIServer:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._env)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r" at (http://\S+) \(Ctrl-C", line):
                self.url_root = found[1]
                threading.Thread(target=self._copy_log, args=(self._process.stderr,), daemon=True).start()
                return self
        raise RuntimeError("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @staticmethod
    def _copy_log(log: Iterable[str]) -> None:
        """Copy what the server logs. A server would wait at a full pipe that is not read."""
        for line in log:
            print(line, end="", file=sys.stderr)

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": self.url_for("v1"),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 600,
        } | options


def known_options(given: list[str]) -> list[str]:
    """The options that `nanovllm serve` has, with their values. "--a=b" is the same as "--a b"."""
    from nanovllm.cli.serve import serve

    names = {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters}
    kept: list[str] = []
    keep = False
    for part in (piece for option in given for piece in option.split("=", 1)):
        if part.startswith("--"):
            keep = part in names or part.replace("--no-", "--", 1) in names
        if keep:
            kept.append(part)
    return kept


def _skip(*_: Any, **__: Any) -> Any:
    import pytest

    pytest.skip("tests a part of vLLM itself")


class _Used(type):
    """The type of `_Unavailable`: reading an attribute of it, or adding to it, skips the test as well."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "pytestmark":
            raise AttributeError(name)
        return _skip()

    __add__ = __radd__ = _skip


class _Unavailable(metaclass=_Used):
    """What a test took from a module of vLLM that is not here."""

    __init__ = _skip  # type: ignore[assignment]


class _Hub:
    """The hub, which has no file for a test: its adapters are refused, and the base model is tested."""

    def snapshot_download(self, **_: Any) -> str:
        return ""


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module `vllm...` is a stand-in."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        from nanovllm import __version__

        if module.__name__ == "vllm.version":
            module.__version__ = __version__  # type: ignore[attr-defined]
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = lambda **_: _tokenizer()  # type: ignore[attr-defined]
        if module.__name__ == "vllm.transformers_utils.repo_utils":
            module.hf_api = _Hub  # type: ignore[attr-defined]


def _tokenizer() -> Any:
    from nanovllm.weights.tokenizer import load_tokenizer

    return load_tokenizer(RemoteOpenAIServer.model_path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--model", help="by default the embedded SmolLM2")
    args, pytest_args = parser.parse_known_args()
    import pytest

    from nanovllm.weights.demo_model import demo_model_path

    RemoteOpenAIServer.model_path = args.model or str(demo_model_path())
    sys.meta_path.insert(0, _StubFinder())
    tests, utils = ModuleType("tests"), ModuleType("tests.utils")
    tests.__path__ = [str(args.checkout / "tests")]
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    sys.modules |= {"tests": tests, "tests.utils": utils}
    plugins: list[Any] = []
    shared = args.checkout / "tests" / "entrypoints" / "conftest.py"  # plain fixtures: schemas, choices, grammars
    if shared.exists():
        spec = importlib.util.spec_from_file_location("shared_fixtures", shared)
        assert spec is not None and spec.loader is not None
        plugins.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(plugins[0])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.chdir(args.checkout)
    return pytest.main(["--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", *pytest_args], plugins)


if __name__ == "__main__":
    sys.exit(main())
