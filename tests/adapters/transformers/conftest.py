"""What tests of the decode loop share."""

from types import SimpleNamespace

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


@pytest.fixture
def captured(monkeypatch):
    """The captures so far. What stands for a graph calls what it has captured."""
    from nanovllm.adapters.transformers.stack import Stack

    captured = []

    def capture(stack, warm_up, fn):
        if warm_up is not None:
            warm_up()
        captured.append(warm_up)
        return SimpleNamespace(replay=fn)

    monkeypatch.setattr(Stack, "capture", capture)
    return captured
