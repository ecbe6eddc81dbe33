"""Masks of many sequences, in a thread and in several."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.structured import mask_filler
from nanovllm.structured.constraint import TokenConstraint
from nanovllm.structured.constraint_maker import ConstraintMaker
from nanovllm.structured.mask_filler import Filling, MaskFiller
from tests.structured.test_constraint import END, SIZE, TOKENIZER, ids, one


@pytest.fixture(scope="module")
def maker():
    return ConstraintMaker(TOKENIZER, SIZE, [END])


def fill(filler, constraints, masks, in_thread, first=None):
    filling = filler.prepare(constraints, masks, in_thread, first)
    if not in_thread or not filler.submit(filling):
        filling.run()
    filling.wait_until_filled()


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("slow_seconds", [10, 0])
@pytest.mark.parametrize("count", [1, 7, 8, 40])  # one after the other, and in threads
def test_many_masks_are_those_of_single_ones(maker, count, slow_seconds, in_thread):
    constraints = maker.make(SamplingParams(n=count, structured_outputs={"regex": "[ab]{3}c"}))
    output = sorted(ids("ab"))
    for i, constraint in enumerate(constraints):
        constraint.take((output * 2)[: i % 4])
    masks = np.zeros((count, constraints[0].num_words), np.int32)
    filler = MaskFiller(slow_seconds, slow_steps_seconds=0)
    fill(filler, constraints, masks, in_thread)
    if not slow_seconds:
        masks[:] = 0
        fill(filler, constraints, masks, in_thread)  # each is timed, since the first ones were slow
    for mask, constraint in zip(masks, constraints):
        single = np.zeros_like(mask)
        constraint.fill(single)
        assert (single == mask).all()
    assert count == 1 or not (masks[0] == masks[3]).all()


@pytest.mark.parametrize("in_thread", [False, True])
def test_grammars_that_move_on_before_their_masks(maker, in_thread):
    """The masks are ready to be filled by then. One that breaks meanwhile gets the mask that `restrict` writes."""
    constraints = maker.make(SamplingParams(n=12, structured_outputs={"regex": "[ab]{3}c"}))
    masks = np.zeros((12, constraints[0].num_words), np.int32)
    (a,), (x,) = ids("a"), ids("x")

    def first():
        assert (masks == -1).all()
        for i, constraint in enumerate(constraints):
            constraint.take([x] if i == 5 else [a] * (i % 4))

    fill(MaskFiller(), constraints, masks, in_thread, first)
    for i, (mask, constraint) in enumerate(zip(masks, constraints)):
        constraint.restrict([], mask)
        found = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE]).tolist())
        assert found & (ids("abc") | {END}) == ({END} if i == 5 else ids("c") if i % 4 == 3 else ids("ab"))
        assert constraint.broken == (i == 5)


def test_masks_that_are_given_up():
    """Those that no thread has begun with are never filled; the others are waited for."""
    calls, may_end = [], threading.Event()

    def made(name):
        return Filling(
            before=lambda: calls.append(f"first {name}"),
            fill=lambda: (may_end.wait(300), calls.append(f"last {name}")),
            end=lambda failed: calls.append(f"end {name}{' failed' * failed}"),
        )

    filler, running, waiting = MaskFiller(), made(1), made(2)
    assert filler.submit(running) and filler.submit(waiting)
    running.wait_until_filling()
    for _ in range(2):
        waiting.cancel_or_wait()
    for wait in (waiting.wait_until_filled, waiting.raise_failure, waiting.wait_until_filling):
        with pytest.raises(RuntimeError, match="given up"):
            wait()
    assert calls == ["first 1", "end 2 failed"]
    threading.Timer(0.1, may_end.set).start()
    for _ in range(2):
        running.cancel_or_wait()
    running.raise_failure()
    waiting.run()
    running.run()
    assert calls == ["first 1", "end 2 failed", "last 1", "end 1"]


def test_masks_without_a_thread_are_filled_once(maker, monkeypatch):
    """An executor that cannot start its thread has queued the work before."""
    failures, calls = [], []

    class Executor(ThreadPoolExecutor):
        def submit(self, *args):
            with pytest.MonkeyPatch.context() as patch:
                if not failures:
                    patch.setattr(threading.Thread, "start", no_thread)
                return super().submit(*args)

    def no_thread(thread):
        failures.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mask_filler, "ThreadPoolExecutor", Executor)
    filler, masks = MaskFiller(), np.zeros((1, one(maker, allowed_token_ids=[3]).num_words), np.int32)
    for name in ("first", "second"):
        constraint = one(maker, allowed_token_ids=[3])
        constraint.fill = lambda mask, name=name: calls.append((name, threading.current_thread()))
        fill(filler, [constraint], masks, True)
    assert [name for name, _ in calls] == ["first", "second"] and len(failures) == 1
    (_, first), (_, second) = calls
    assert first is threading.current_thread() is not second, "a thread is tried again"


class SlowMatcher:
    """Takes 50 ms of a processor for a mask."""

    def __init__(self, num_bytes=16):
        self.num_bytes = num_bytes

    def compute_bitmask(self):
        start = time.thread_time()
        while time.thread_time() < start + 0.05:
            pass
        return bytes(self.num_bytes)


def test_a_sequence_whose_masks_take_long_ends():
    constraint, mask = TokenConstraint(SlowMatcher(), None, 4), np.zeros(4, np.int32)
    for _ in range(9):
        constraint.fill(mask)
    assert constraint.error is None
    for _ in range(3):
        constraint.fill(mask)
    assert "too long" in constraint.error and not constraint.broken  # its masks are right all the same


def test_a_slow_sequence_among_many_is_found(maker):
    """The threads of llguidance say only that all masks took long; then each is timed."""
    others = maker.make(SamplingParams(n=11, structured_outputs={"regex": "[ab]+"}))
    filler, masks = MaskFiller(0, slow_steps_seconds=0), np.zeros((12, others[0].num_words), np.int32)
    filler.fill([*others, *maker.make(SamplingParams(structured_outputs={"regex": "[ab]+"}))], masks)
    slow = TokenConstraint(SlowMatcher(masks[0].nbytes), None, others[0].num_words)
    for _ in range(12):
        filler.fill([*others, slow], masks)
    assert "too long" in slow.error and not any(constraint.error for constraint in others)


@pytest.mark.parametrize("slow_steps_seconds, timed", [(1e-9, True), (60, False)])
def test_each_mask_is_timed_only_when_slow_steps_add_up(maker, slow_steps_seconds, timed):
    """Timing takes long: one slow mask in a hundred, which any grammar may have, does not lead there."""
    constraints = maker.make(SamplingParams(n=12, structured_outputs={"regex": "[ab]+"}))
    masks, single = np.zeros((12, constraints[0].num_words), np.int32), []
    for constraint in constraints:
        constraint.fill = lambda mask, fill=constraint.fill: (single.append(mask), fill(mask))
    filler = MaskFiller(slow_seconds=0, slow_steps_seconds=slow_steps_seconds)
    filler.fill(constraints, masks)
    assert not single
    for _ in range(3):
        filler.fill(constraints, masks)
    assert len(single) == (36 if timed else 0)
