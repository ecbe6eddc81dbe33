"""Fixtures that the tests of the CUDA C++ kernels share."""

import importlib

import pytest
import torch


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Builds of this file go to a folder of their own, so the first call compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


@pytest.fixture
def device(request):
    """The GPU, if the kernels of the test's module run there: `SUPPORT` says why not."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := request.module.SUPPORT(device)) is not None:
        pytest.skip(reason)
    return device


@pytest.fixture
def launches(monkeypatch):
    """How often the kernels of products were launched."""
    seen = []
    for name in ("packed", "fp8"):
        module = importlib.import_module(f"nanovllm.kernels.cuda.{name}.products")

        def kernel(*where, original=module.product_kernel):
            compiled = original(*where)
            return lambda *args: seen.append(args[0]) or compiled(*args)

        monkeypatch.setattr(module, "product_kernel", kernel)
    return seen
