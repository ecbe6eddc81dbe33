"""Fixtures that several parts of the suite share."""

from pathlib import Path

import pytest

from nanovllm.models.embedded import EmbeddedModelError, embedded_model_path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
