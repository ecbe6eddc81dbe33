"""Fixtures that the tests of Triton's kernels share."""

import pytest

from tests.kernels.triton.common import poisoned_memory


@pytest.fixture
def poison(monkeypatch):
    """Memory that a kernel gets is NaN, and what lies around it must stay so."""
    with poisoned_memory(monkeypatch):
        yield
