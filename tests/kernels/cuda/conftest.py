"""Fixtures that the tests of the CUDA C++ kernels share."""

import importlib

import pytest
import torch


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
def hopper(device):
    """The GPU, if it has the instructions of compute capability 9.0 alone."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return device


@pytest.fixture
def launches(monkeypatch):
    """How often the kernels of products were launched."""
    seen = []
    for name in ("packed.linear_packed", "fp8.linear_fp8"):
        module = importlib.import_module(f"nanovllm.kernels.cuda.{name}")

        def kernel(*where, original=module.product_kernel):
            compiled = original(*where)
            return lambda *args: seen.append(args[0]) or compiled(*args)

        monkeypatch.setattr(module, "product_kernel", kernel)
    return seen
