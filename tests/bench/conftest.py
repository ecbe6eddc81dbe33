"""Profiles of these tests look at separate ops: on a CPU the layers would run as one."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def separate_ops():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_KERNELS", "decoder_step=native;sample=native")
        yield
