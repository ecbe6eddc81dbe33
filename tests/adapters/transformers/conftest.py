"""What tests of the decode loop share."""

import pytest


@pytest.fixture
def steps(monkeypatch):
    """Whether the loop took each call."""
    from nanovllm.adapters.transformers.stack import Stack  # transformers may be missing: its tests are skipped then

    taken, own = [], Stack.step

    def step(stack, x, given):
        result = own(stack, x, given)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(Stack, "step", step)
    return taken
