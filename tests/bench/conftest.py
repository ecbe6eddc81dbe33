"""Profiles of these tests look at separate ops: on a CPU the layers would run as one, and sampling beside them."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def separate_ops():
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("NANOVLLM_KERNELS", "*=native")
        yield
