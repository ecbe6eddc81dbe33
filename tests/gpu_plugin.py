"""What each process of `make test-gpu` loads as a plugin of pytest: its GPU, the files it imports, the order of the
tests, and a report of each.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# What `gpu_run` tells its processes. TURN: a file; it is locked until the first test may begin.
GPUS, REPORT, TURN = "NANOVLLM_TEST_GPUS", "NANOVLLM_TEST_REPORT", "NANOVLLM_TEST_TURN"
# What each part of a run selects, and the words of which a file that has such tests contains one.
SIDE_BY_SIDE = "(gpu or triton or any_device) and not alone and not several_gpus"
SEVERAL_GPUS, ALONE = "gpu and several_gpus", "gpu and alone"
_WORDS = {
    SIDE_BY_SIDE: ("mark.gpu", "mark.triton", "mark.any_device", "import DEVICES"),
    SEVERAL_GPUS: ("mark.several_gpus",), ALONE: ("mark.alone",),
}  # fmt: skip

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and GPUS in os.environ:  # before CUDA starts in this process
    _gpus = os.environ[GPUS].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = _gpus[int(_worker.removeprefix("gw")) % len(_gpus)]

# By what their kernels take to compile, most first: parts of names. Begun last, one would keep a single core busy.
_FIRST = (
    "test_verified[attention_prefill", "test_verified[attention_dense", "test_cuda_graphs.py",
    "test_verified[qk_norm_rope_attention", "test_decode_shared.py::test_batches", "test_verified[attention",
    "test_hopper_product.py::test_products", "test_hopper_product.py::test_any_plan",
    "test_tiled_products.py::test_gated_mlp", "test_tiled_products.py::test_any_strides", "test_tune_gpu.py",
    "test_experts.py", "test_decode_shared.py", "test_decode.py", "test_decode_projected.py", "test_prefill.py",
    "test_prefill_graphs_gpu.py", "test_greedy.py", "test_transformers", "test_policy.py", "test_smollm2.py",
    "test_verified[linear", "test_verified[moe", "test_verified[gated_mlp", "test_verified[",
)  # fmt: skip
# Then the rest, then what loads libraries that are compiled for a minute at first, then short tests of kernels.
_LIBRARIES = ("tests/kernels/cuda/", "tests/lab/")
_BY_TURNS = "tests/kernels/triton/"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without such tests is not imported: to import all takes each process some seconds."""
    words = _WORDS.get(config.option.markexpr)
    if words is None or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if any(word in text for word in words) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first; the same in each process.

    At the end one test of each file of _BY_TURNS, and so on. Neighbours of a file often need the same kernels: a
    process would wait while another compiles them.
    """
    turns: Counter[Path] = Counter()

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.nodeid
        first = next((i for i, part in enumerate(_FIRST) if part in name), len(_FIRST))
        if any(part in name for part in _LIBRARIES):
            return len(_FIRST) + 1, 0
        if first < len(_FIRST) or _BY_TURNS not in name:
            return first, 0
        turns[item.path] += 1
        return len(_FIRST) + 2, turns[item.path]

    items.sort(key=place)


_LARGE = "test_verified[qk_norm_rope_attention"
"""References of these ops take up to 55 GiB, so of one op only one dtype at a time."""
_ONE_ENGINE = tuple(f"tests/llm/test_{name}.py" for name in ("bad_input", "chat_tools", "async_llm"))


def group_of(test: str) -> str:
    """A name that tests share which one process runs, one after the other: they use one engine, which each process
    that gets some of them would build, or much memory.
    """
    path, _, name = test.partition("::")
    if path.endswith(_ONE_ENGINE):
        return path
    if name.startswith(_LARGE):
        return test.partition("-")[0]
    modes = [mode for mode in ("[sync", "[async") if mode in name]
    return path + modes[0] if modes and "tests/llm/" in path else test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist load --maxschedchunk 1`, but a group of tests goes to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            """A worker begins a test when it knows the next."""
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)
            if not self.workqueue:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """What it has not begun goes to others; the test that it died in does not."""
            work = self.assigned_work[node]
            died = next(((unit, test) for unit in work.values() for test, done in unit.items() if not done), None)
            if died is None:
                return super().remove_node(node)
            unit, test = died
            unit[test] = True
            for scope in [scope for scope, tests in work.items() if all(tests.values())]:
                del work[scope]
            super().remove_node(node)
            return test

    config.option.loadscopereorder = False
    return Groups(config, log)


_compiled: list[tuple[str, str, float]] = []
"""(the kernel's name, the key in Triton's cache, seconds) of what this process compiled since the last test's end."""


def pytest_collection_finish() -> None:
    if _worker and REPORT in os.environ:
        _watch_compiler()
    if _worker and TURN in os.environ:
        with open(os.environ[TURN]) as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # all is imported, so that tests begin as soon as the lock is free


def _watch_compiler() -> None:
    """Triton says what it compiles, and compiles nothing that another worker is compiling."""
    try:
        import triton
        from triton import compiler, knobs
    except ImportError:  # there is no Triton, or an old one
        return

    def note(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            _compiled.append((src.name, metadata["hash"], times.total / 1e6))

    knobs.compilation.listener = note
    # Kernels take it from triton.compiler when they are first launched.
    triton.compile = compiler.compile = _one_at_a_time(compiler.compile, Path(os.environ[REPORT]).parent)


def _one_at_a_time(compile_: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Triton's compile, which waits while any process compiles the same, and then finds the result in Triton's cache.

    Tests that run at the same time are often neighbours, which need the same kernels.
    """

    def compile_once(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if not hasattr(src, "hash"):  # the path of a file
            return compile_(src, target, options, **more)
        key = f"{src.hash()} {target} {sorted((options or {}).items(), key=str)}"
        with open(folder / f"{hashlib.sha256(key.encode()).hexdigest()}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            return compile_(src, target, options, **more)

    return compile_once


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    item.user_properties.append(("compiled", _compiled[:]))
    _compiled.clear()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        item.user_properties.append(("gib", torch.cuda.max_memory_reserved() / 2**30))
        torch.cuda.empty_cache()  # for the other processes of this GPU
        torch.cuda.reset_peak_memory_stats()


def _told(kind: str, **values: Any) -> None:
    if REPORT in os.environ and not _worker:
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps({"kind": kind, "at": time.time(), **values}) + "\n")


@pytest.hookimpl(optionalhook=True)  # there is no such hook without xdist
def pytest_xdist_node_collection_finished(ids: Sequence[str]) -> None:
    _told("collected", tests=list(ids))


def pytest_runtest_logstart(nodeid: str) -> None:
    _told("start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    said = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        said = report.longrepr[2]
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if crash is not None else str(report.longrepr).strip()
    noted = {name: value for name, value in report.user_properties if name in ("compiled", "gib")}
    _told("end", test=report.nodeid, when=report.when, outcome=report.outcome, said=said, **noted)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _told("end", test=report.nodeid, when="collect", outcome="failed", said=str(report.longrepr))
