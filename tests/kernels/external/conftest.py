"""A fixture for every test of FlashAttention and FlashInfer."""

import pytest

from nanovllm.kernels.external import flash_attn, flashinfer
from nanovllm.kernels.external.packages import import_error


@pytest.fixture(autouse=True)
def fresh():
    """What the modules remember of the machine belongs to one test."""
    cached = (
        flash_attn.installed, flash_attn.variant, flash_attn._function, flashinfer._wrapper,
        flashinfer._shared_workspace, import_error,
    )  # fmt: skip
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()
