"""Where nothing may fill masks any more: before other steps, before a capture, after a failure, before a plain fill."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanovllm.engine.fast.cuda_graphs import GraphTable
from tests.engine.fast.gates import SECONDS, RecordingGate
from tests.engine.fast.replayed import ReplayedFunctions
from tests.engine.fast.test_mask_gate import builder_with, far_behind
from tests.engine.fast.test_mask_thread import PARAMS, PROMPTS
from tests.engine.test_token_masks import allowed, row


@pytest.fixture
def behind(directory):
    llm, gate, may_fill = far_behind(directory)
    yield llm, gate, may_fill
    may_fill.set()


def soon(event):
    """Long enough that what does not wait for the event comes before it."""
    threading.Timer(0.5, event.set).start()


def noting(gate, opened, call):
    """`call`, which notes whether all masks that were begun are there."""
    begun = gate.waited[-1]
    return lambda *args: (opened.append(gate.is_open(begun)), call(*args))[1]


def test_a_step_that_runs_kernel_by_kernel_waits_for_them(behind, monkeypatch):
    llm, gate, may_fill = behind
    fast, opened = llm.engine.runner.fast, []
    monkeypatch.setattr(fast, "logits", noting(gate, opened, fast.logits))
    llm.engine.add_request(PROMPTS[1], PARAMS[1])
    soon(may_fill)
    llm.engine.step()
    assert opened == [True]


def test_a_capture_waits_for_them(behind, monkeypatch):
    llm, gate, may_fill = behind
    graphs, opened = GraphTable(ReplayedFunctions(None)), []
    llm.engine.runner.fast.decoder.graphs = graphs
    monkeypatch.setattr(graphs, "capture", noting(gate, opened, graphs.capture))
    soon(may_fill)
    llm.engine.step()
    assert opened == [True]


def test_a_failure_waits_for_them(behind, monkeypatch):
    llm, gate, may_fill = behind
    graphs = llm.engine.runner.fast.decoder.graphs

    def fail(*args):
        raise RuntimeError("no more fish")

    monkeypatch.setattr(graphs, "replay", fail)
    soon(may_fill)
    with pytest.raises(RuntimeError, match="no more fish"):
        llm.engine.step()
    assert gate.is_open(gate.waited[-1])


def test_a_plain_fill_waits_for_the_thread_with_the_same_constraint():
    builder, _ = builder_with(RecordingGate)
    constrained, begun, may_fill, order = row(2, [40]), threading.Event(), threading.Event(), []
    fill = constrained.seq.constraint.fill

    def slow(mask):
        order.append("begin")
        begun.set()
        may_fill.wait(SECONDS)
        fill(mask)
        order.append("end")

    constrained.seq.constraint.fill = slow
    builder.start([constrained], True, device_waits=True).to_device()
    assert begun.wait(SECONDS)
    with ThreadPoolExecutor(1) as caller:
        plain = caller.submit(builder.make, [constrained])
        soon(may_fill)
        assert allowed(plain.result(SECONDS)) == {2: {40}}
    assert order == ["begin", "end"] * 2
