"""Runs vLLM's own tests of its OpenAI server against this server.

git clone https://github.com/vllm-project/vllm; pip install pytest-asyncio jsonschema regex requests fastapi anthropic
python -m benchmarks.serving.vllm_tests vllm tests/entrypoints/openai/completion/test_completion.py --model MODEL

The tests start a server through `tests.utils.RemoteOpenAIServer` alone. This one starts `nanovllm serve` with `--model`
under whatever name a test has, and drops options of vLLM that it does not know. Modules of vLLM are stand-ins: what a
test takes from them skips the test when it is used. Arguments after the checkout go to pytest.

`--dtype` of a test is dropped, since bfloat16 is slow on a CPU. `--longest` bounds the model's length, since some tests
let the model write until its end; `serve/tokenize`, `serve/instrumentator` and `openai/test_chunked_prompt.py` need
`--longest 8192`. The conftest.py of the tests' own directories is loaded, but not that of `tests`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
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
    longest = 2048
    """The most that `--max-model-len` may be."""

    def __init__(self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any):
        self.command = [
            sys.executable, "-m", "nanovllm", "serve", "--model", self.model_path, "--served-model-name", model,
            "--port", "0", *bounded(known_options(vllm_serve_args), self.longest),
        ]  # fmt: skip
        self._env = os.environ | (env_dict or {})

    def __enter__(self) -> RemoteOpenAIServer:
        self._process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=self._env)
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

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._options(options, self.url_root))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._options(options, self.url_root))

    def _options(self, options: dict[str, Any], base_url: str | None = None) -> dict[str, Any]:
        return {
            "base_url": base_url or self.url_for("v1"),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 600,
        } | options


def known_options(given: list[str]) -> list[str]:
    """The options that `nanovllm serve` has, with their values, but `--dtype`. "--a=b" is the same as "--a b"."""
    from nanovllm.cli.serve import serve

    names = {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters} - {"--dtype"}
    kept: list[str] = []
    keep = False
    for part in (piece for option in given for piece in option.split("=", 1)):
        if re.match("--?[a-z]", part):
            part = part.replace("_", "-")
            keep = part in names or part.replace("--no-", "--", 1) in names
        if keep:
            kept.append(part)
    return kept


def bounded(options: list[str], longest: int) -> list[str]:
    """The options, with a `--max-model-len` of at most `longest`."""
    name = "--max-model-len"
    if name not in options:
        return [*options, name, str(longest)]
    at = options.index(name) + 1
    return [*options[:at], str(min(longest, int(options[at]))), *options[at + 1 :]]


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

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return ""


class _Platform:
    """What `current_platform` tells: none of vLLM's."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda *_: False


class _StubModule(ModuleType):
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
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        from nanovllm import __version__

        if module.__name__ == "vllm.version":
            module.__version__ = __version__  # type: ignore[attr-defined]
        if module.__name__ == "vllm.platforms":
            module.current_platform = _Platform()  # type: ignore[attr-defined]
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = lambda **_: _tokenizer()  # type: ignore[attr-defined]
        if module.__name__ == "vllm.transformers_utils.repo_utils":
            module.hf_api = _Hub  # type: ignore[attr-defined]


def _tokenizer() -> Any:
    from nanovllm.weights.tokenizer import load_tokenizer

    return load_tokenizer(RemoteOpenAIServer.model_path)


def _utils(checkout: Path) -> ModuleType:
    """`tests.utils`: the server, and what else the tests of servers take from there."""
    import pytest

    utils: Any = _StubModule("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer
    utils.VLLM_PATH = checkout
    utils.ROCM_EXTRA_ARGS, utils.ROCM_ENV_OVERRIDES = [], {}
    utils.multi_gpu_only = lambda **_: pytest.mark.skip("asks for several GPUs")
    utils.requires_fp8 = pytest.mark.skip("asks for a GPU with fp8")
    return utils


def _conftests(checkout: Path, pytest_args: list[str]) -> list[Any]:
    """The conftest.py of each test file's directory, and of those above, without that of `tests`."""
    root = checkout / "tests"
    found: dict[str, Any] = {}
    for argument in pytest_args:
        path = checkout / argument.split("::")[0]
        for directory in reversed([path, *path.parents]):
            if directory != root and directory.is_relative_to(root) and (directory / "conftest.py").exists():
                name = ".".join(directory.relative_to(checkout).parts) + ".conftest"
                found[name] = importlib.import_module(name)
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--model", help="by default the embedded SmolLM2")
    parser.add_argument("--longest", type=int, default=RemoteOpenAIServer.longest, help="the most tokens of a sequence")
    args, pytest_args = parser.parse_known_args()
    if not (args.checkout / "tests").is_dir():
        parser.error(f"{args.checkout}: holds no tests; pass a checkout of vLLM")
    import pytest

    from nanovllm.weights.demo_model import demo_model_path

    RemoteOpenAIServer.model_path = args.model or str(demo_model_path())
    RemoteOpenAIServer.longest = args.longest
    checkout = args.checkout.resolve()
    sys.meta_path.insert(0, _StubFinder())
    tests = ModuleType("tests")
    tests.__path__ = [str(checkout / "tests")]
    sys.modules |= {"tests": tests, "tests.utils": _utils(checkout)}
    plugins = _conftests(checkout, pytest_args)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.chdir(checkout)
    return pytest.main(["--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", *pytest_args], plugins)


if __name__ == "__main__":
    sys.exit(main())
