"""A switch that the tests of row kernels share."""

import pytest


@pytest.fixture
def many(monkeypatch):
    """A few rows, elements or tokens count as many."""
    from nanovllm.kernels.triton.rows import activation, elementwise, layernorm_chain, norm, rotary

    for module, name in (
        (norm, "MANY_ROWS"), (layernorm_chain, "MANY_ROWS"), (activation, "_FEW_ELEMENTS"), (elementwise,
        "_FEW_ELEMENTS"),
        (rotary, "_MANY_TOKENS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 0)
