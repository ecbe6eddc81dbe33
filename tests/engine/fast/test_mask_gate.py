"""The gate at which a step waits for its masks: it opens, whatever happens on the host."""

import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from nanovllm.engine.fast.mask_thread import ThreadedMaskBuilder
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.engine.token_masks import ConstrainedRow
from tests.engine.fast.gates import (
    SECONDS,
    RecordingGate,
    WaitingGate,
    fill_slowly,
    gates,
    interrupt_while_it_generates,
)
from tests.engine.fast.test_mask_thread import PARAMS, PROMPTS, engine
from tests.engine.fast.test_policy import REPLAYED, SMALL
from tests.engine.simulated_engine import assert_clean
from tests.engine.small_engine import generate
from tests.engine.test_token_masks import allowed, row
from tests.own_thread import in_own_thread
from tests.waiting import wait_until


class Tokens:
    """A step whose tokens come when `there` is set."""

    def __init__(self, *seqs, failure=None):
        self.step, self.sampling = self, seqs
        self.there, self.failure = threading.Event(), failure

    def token_ids(self):
        assert self.there.wait(SECONDS)
        if self.failure is not None:
            raise self.failure
        return [7] * len(self.sampling)


def pending(number, tokens):
    """A row whose last token is not known yet."""
    _, seq, position = row(number, tokens)
    return ConstrainedRow(number, seq, position + 1)


def builder_with(kind):
    make_gate, made = gates(kind)
    builder = ThreadedMaskBuilder(torch.device("cpu"), 4, make_gate)
    builder.start([row(0, [1])])  # makes the gate
    return builder, made[0]


def test_the_device_waits_for_masks_and_the_caller_for_the_tokens():
    """What is launched behind the gate may hold up calls of CUDA, such as the thread's wait for the tokens."""
    builder, gate = builder_with(RecordingGate)
    rows = [pending(2, [1, 5])]
    latest, may_fill = Tokens(rows[0].seq), threading.Event()
    fill = rows[0].seq.constraint.fill
    rows[0].seq.constraint.fill = lambda mask: (may_fill.wait(SECONDS), fill(mask))
    builder.step_launched(latest)
    masks = builder.start(rows, True, device_waits=True)
    with ThreadPoolExecutor(1) as caller:
        there = caller.submit(masks.to_device)
        time.sleep(0.1)
        assert not there.done() and gate.waited == []
        latest.there.set()
        there = there.result(SECONDS)
    assert gate.waited == [2] and not gate.is_open(2)
    assert rows[0].seq.constraint.num_taken == 1
    may_fill.set()
    builder.drain()
    assert gate.is_open(2) and not gate.is_open(3)
    masks.filling.raise_failure()
    assert allowed(there) == {2: set(range(128))}  # what a device copies that does not wait


def test_a_gate_that_goes_back_is_a_failure():
    builder, gate = builder_with(WaitingGate)
    gate.word[0] = 9
    masks = builder.start([row(1, [4])], True, device_waits=True)
    with pytest.raises(AssertionError, match="in order"):
        builder.drain()
        masks.filling.raise_failure()


def test_the_device_waits_for_all_that_changes_the_masks():
    """Also for what `restrict` does."""
    builder, gate = builder_with(WaitingGate)
    first, second = row(3, [1, 2]), row(0, [98])
    restrict = first.seq.constraint.restrict
    first.seq.constraint.restrict = lambda *args: (time.sleep(0.05), restrict(*args))
    for _ in range(3):
        masks = builder.start([first, second], True, device_waits=True)
        assert allowed(masks.to_device()) == {3: {1, 2}, 0: {98}}
    assert gate.waited == [2, 3, 4]


def test_a_caller_that_waits_needs_no_gate():
    builder, gate = builder_with(WaitingGate)
    masks = builder.start([row(1, [4])], True, device_waits=True)
    assert allowed(masks.to_device(host_waits=True)) == {1: {4}}
    masks = builder.start([row(1, [5])], True)
    assert allowed(masks.to_device()) == {1: {5}}
    assert gate.waited == [] and gate.is_open(3)


def test_values_wrap_around():
    builder, gate = builder_with(WaitingGate)
    builder._buffers._value = 2**32 - 3
    gate.word[0] = -3
    for i in range(6):
        masks = builder.start([row(1, [i])], True, device_waits=True)
        assert allowed(masks.to_device()) == {1: {i}}
    assert gate.waited == [2**32 - 2, 2**32 - 1, 0, 1, 2, 3]


@pytest.mark.parametrize("place", ["tokens", "fill", "restrict"])
def test_the_gate_opens_after_a_failure(place):
    builder, gate = builder_with(WaitingGate)
    failing, other = pending(0, [1, 2]), pending(1, [3])
    latest = Tokens(failing.seq, other.seq, failure=RuntimeError("no more fish") if place == "tokens" else None)
    latest.there.set()
    if place != "tokens":
        setattr(failing.seq.constraint, place, lambda *args: (args[-1].fill(0), 1 / 0))  # args[-1] is the mask
    builder.step_launched(latest)
    masks = builder.start([failing, other], True, device_waits=True)
    if place == "tokens":
        with pytest.raises(RuntimeError, match="no more fish"):
            masks.to_device()
        assert gate.waited == [] and gate.is_open(2)
    else:
        there = masks.to_device()
        assert set(allowed(there)) == {0, 1} and all(allowed(there).values()), "a row is left without a token"
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        masks.filling.raise_failure()
    assert allowed(builder.start([row(1, [3])], True, device_waits=True).to_device()) == {1: {3}}


def test_without_a_thread_the_caller_fills_them_before_the_device_waits(monkeypatch):
    builder, gate = builder_with(RecordingGate)

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        masks = builder.start([row(2, [40])], True, device_waits=True)
    assert gate.is_open(2) and gate.waited == []
    assert allowed(masks.to_device()) == {2: {40}}


def test_an_interrupt_at_any_line_leaves_no_wait_behind():
    """Ctrl-C raises in the main thread between any two lines; all that is given up is ended by `drain`."""
    files = ("token_masks.py", "mask_thread.py", "mask_filler.py", "gates.py")

    def interrupt_at(count):
        left = [count]

        def trace(frame, event, arg):
            if not frame.f_code.co_filename.endswith(files) or frame.f_code.co_name == "is_open":
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        return trace

    def begin_and_finish(rows, trace):
        sys.settrace(trace)
        builder.start(rows, True, device_waits=True).to_device()

    builder, gate = builder_with(RecordingGate)
    count = interrupted = 0
    while interrupted == count:
        count += 1
        rows = [pending(i, [i, 50]) for i in range(3)]
        latest = Tokens(*(r.seq for r in rows))
        builder.step_launched(latest)
        latest.there.set()
        try:
            in_own_thread(partial(begin_and_finish, rows, interrupt_at(count)))
        except KeyboardInterrupt:
            interrupted += 1
        builder.drain()
        assert not gate.waited or gate.is_open(gate.waited[-1]), f"after an interrupt at line {count}"
        if count % 2:  # the buffer in turn may be one that was given up, or the other one
            masks = builder.start([row(1, [3])], True, device_waits=True)
            gate.waited.pop() if gate.waited else None
            assert allowed(masks.to_device(host_waits=True)) == {1: {3}}
    assert count > 60, "too few lines: what was interrupted?"


def gated(kind=WaitingGate):
    make_gate, made = gates(kind)
    return FastPolicy.off(device_state=True, mask_thread=True, mask_gate=make_gate, **SMALL, **REPLAYED), made


def far_behind(directory):
    """(an engine whose thread fills masks, while its stream is far behind; its gate; what lets them be filled)"""
    policy, made = gated()
    llm = engine(directory, policy)
    llm.engine.add_request(PROMPTS[0], PARAMS[0])
    for _ in range(4):
        llm.engine.step()
    (gate,) = made
    gate.launch_wait = gate.waited.append  # now the stream falls far behind
    may_fill = threading.Event()
    fill_slowly(llm, lambda: may_fill.wait(SECONDS))
    llm.engine.step()
    assert not gate.is_open(gate.waited[-1])
    return llm, gate, may_fill


@pytest.fixture(scope="module")
def expected(directory):
    return generate(engine(directory, FastPolicy.off(), asynchronous=False), PROMPTS, PARAMS)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_same_tokens(directory, expected, asynchronous):
    """Among them are rows with log-probabilities, which the host takes part in sampling."""
    policy, made = gated()
    llm = engine(directory, policy, asynchronous)
    for _ in range(2):
        before = len(made[0].waited) if made else 0
        assert generate(llm, PROMPTS, PARAMS) == expected
        assert len(made) == 1 and len(made[0].waited) > before + 20
    assert_clean(llm.engine)


@pytest.mark.parametrize("place", ["take", "restrict"])
@pytest.mark.parametrize("call", [1, 2, 6])
def test_masks_that_fail_lose_their_requests_alone(directory, expected, place, call):
    policy, made = gated()
    llm = engine(directory, policy)
    requests = [llm.engine.add_request(p, q) for p, q in zip(PROMPTS, PARAMS)]
    constraint = requests[3].completions[0].seq.constraint
    original, calls = getattr(constraint, place), []

    def failing(*args):
        calls.append(args)
        if len(calls) == call:
            raise RuntimeError("no more fish")
        return original(*args)

    setattr(constraint, place, failing)
    with pytest.raises(RuntimeError, match="no more fish"):
        while llm.engine.has_unfinished:
            llm.engine.step()
    # The tokens that were drawn with these masks are not used: one is drawn with each mask before.
    assert requests[3].num_output_tokens < call and requests[3].failure is not None
    assert_clean(llm.engine)
    assert generate(llm, PROMPTS, PARAMS) == expected


def test_slow_masks_are_waited_for(directory, expected):
    policy, _ = gated()
    llm = engine(directory, policy)
    fill_slowly(llm, lambda: time.sleep(0.02))
    assert generate(llm, PROMPTS, PARAMS) == expected


def test_interrupts_of_an_engine(directory, expected):
    policy, made = gated()
    llm = engine(directory, policy)
    assert generate(llm, PROMPTS, PARAMS) == expected
    assert interrupt_while_it_generates(llm, PROMPTS, PARAMS, np.linspace(0.01, 0.15, 25).tolist())
    assert generate(llm, PROMPTS, PARAMS) == expected
    assert_clean(llm.engine)


def test_an_engine_that_is_dropped_in_a_step(directory):
    llm, gate, may_fill = far_behind(directory)
    waited = gate.waited[-1]
    threading.Timer(0.1, may_fill.set).start()
    del llm
    gc.collect()
    wait_until(lambda: gate.is_open(waited), SECONDS)
