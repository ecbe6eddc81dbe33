"""Fixtures that several parts of the suite share."""

import os
from pathlib import Path

import pytest

from nanovllm.models.embedded import EmbeddedModelError, embedded_model_path
from tests.interpreter import quicken

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

# They take a minute each without a GPU. Begun first (with --no-loadscope-reorder), they do not keep one process busy while others have nothing to do.
_LONGEST = ("test_smollm2.py", "test_triton_ops.py", "test_triton_ops_sample.py", "test_verify.py", "test_triton_linear.py", "test_triton_decode.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct file. `make test` fetches it beforehand, so that nothing is skipped there."""
    try:
        return embedded_model_path(progress=False)
    except EmbeddedModelError as error:
        pytest.skip(str(error))
