"""Fixtures that several parts of the suite share."""

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanovllm.weights.demo_model import DemoModelError, demo_model_path
from tests.interpreter import quicken
from tests.warm_python import WarmPython, started

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from nanovllm.hardware.gpu_presets import DeviceModel

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

# They take half a minute to two and a half without a GPU. Begun first (with --no-loadscope-reorder), longest first,
# they do not keep one process busy while others have nothing to do.
_LONGEST = (
    "test_interpreted.py", "test_attention_compile.py", "test_cpu_builds.py", "test_decode_hopper_ptx.py",
    "test_guide.py", "test_plan_compile.py", "test_torch_library.py", "test_api_servers.py", "test_pages.py",
    "test_tiled_products_compile.py", "test_sample_compile.py", "test_packed_products_compile.py",
    "test_moe_compile.py", "test_decode_hopper_plan.py", "test_prefill_hopper_ptx.py", "test_server.py",
    "test_packed.py", "test_rows_compile.py", "test_smollm2.py", "test_quantised_accuracy.py",
    "test_same_tokens.py", "test_turns.py", "test_packed_products_ptx.py", "test_small_products_compile.py",
    "test_fused_ops.py", "test_transformers_attention.py", "test_bench.py", "test_quantised_checkpoints.py",
    "test_cli.py", "test_profiler.py", "test_verify_jobs.py", "test_ranks.py", "test_custom_kernels.py",
    "test_quickstart.py", "test_cpu_threads.py", "test_beside_vllm.py", "test_cuda_kernels.py", "test_lab.py",
    "test_tensor_parallel.py", "test_cli_lab.py", "test_policy.py", "test_greedy.py", "test_async_llm.py",
    "test_cli_fuse.py", "test_cli_kernels.py",
)  # fmt: skip

# What compiles many kernels, or emulates compiled ones: `make test` leaves these files out, `make test-rest` runs them.
_SLOW = ("_compile.py", "_ptx.py")


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would all programs that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m "slow and not gpu"` imports no file in which no test is slow: three quarters of them. Nor does
    `-m "slow and alone and not gpu"` import one in which no test is both.
    """
    expression = config.option.markexpr
    if not expression.startswith("slow") or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    slow = collection_path.name.endswith(_SLOW) or "mark.slow" in text
    return None if slow and ("mark.alone" in text or not expression.startswith("slow and alone")) else True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second process collects backwards. In a fresh clone, where no compiled module is kept yet, each process
    then finds half of the test modules compiled by the other, with their assertions rewritten.
    """
    report = yield
    if isinstance(collector, pytest.Directory) and os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before -m selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, tuple[str, ...]]:
        return _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST), item.path.parts

    items.sort(key=place)  # the same order in every process
    for item in items:
        if item.path.name.endswith(_SLOW):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("triton")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no CUDA device"))
            if os.environ.get("TRITON_INTERPRET") != "1":  # test_interpreted.py runs them
                elsewhere = [item for item in marked if item.get_closest_marker("triton")]
                config.hook.pytest_deselected(items=elsewhere)
                items[:] = [item for item in items if not item.get_closest_marker("triton")]


@pytest.fixture(autouse=True, scope="module")
def the_same_draws_of_fixtures() -> None:
    """As `the_same_draws`, for the fixtures that a module's tests share."""
    import torch

    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def the_same_draws(request: pytest.FixtureRequest) -> None:
    """For what a test draws without a seed of its own, whichever tests this process ran before: bounds on errors are
    tight.
    """
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("triton"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def ctrl_c_is_as_before() -> Iterator[None]:
    """A command of the package that a test runs in this process takes Ctrl-C over, for the rest of the process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def gpu_memory_goes_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch keeps freed memory for its own process, and the GPU tests of several processes share one GPU."""
    yield
    if any(request.node.get_closest_marker(name) for name in ("gpu", "any_device")):
        import torch

        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def pytest_collection_finish() -> None:
    """What was imported and collected stays. Each of the hundreds of engines that start and end collects garbage, and
    need not look at it.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The same for what is left when a file's fixtures are gone, such as modules, compiled kernels and reports: a tenth
    of the time of all tests went into looking at it again.
    """
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def known_support() -> None:
    """What can run on this machine is asked once in a process: here, before tests change the environment."""
    import torch

    from nanovllm.kernels import all_ops

    for op in all_ops().values():
        for provider in op.providers.values():
            provider.support(torch.device("cpu"))


@pytest.fixture(scope="session")
def measured_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple["DeviceModel", bool]:
    """(what `this_device` measures on the GPU now, whether other programs used the GPU meanwhile).

    Rates of this minute, which nothing else reads: they may be disturbed. All dtypes take some ten seconds.
    """
    import torch

    from nanovllm.hardware.gpu_presets import this_device
    from tests.shared_gpu import gpu_is_shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_CACHE", str(tmp_path_factory.mktemp("rates")))
        shared = gpu_is_shared()
        found = this_device(torch.device("cuda", torch.cuda.current_device()), refresh=True)
    return found, gpu_is_shared() or shared


@pytest.fixture(scope="session")
def llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer."""
    from tests import tiny

    path = tmp_path_factory.mktemp("llama")
    tiny.save_with_tokenizer(path, "llama", seed=3)
    return path


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 without a tokenizer."""
    from tests import tiny

    path = tmp_path_factory.mktemp("model") / "tiny-qwen3"
    tiny.save(path, "qwen3", seed=5)
    return path


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    with started() as python:
        yield python


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct file. `make test` fetches it beforehand, so that nothing is skipped there."""
    try:
        return demo_model_path(progress=False)
    except DemoModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def browser() -> Iterator["Browser"]:
    """Chromium, with time enough for a busy machine."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with playwright.sync_playwright() as p:
        try:
            chromium = p.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=300_000)
        except playwright.Error as error:
            pytest.skip(f"no Chromium here: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()
