"""Python's garbage collector around work that makes many objects which stay."""

import gc
import weakref
from contextlib import nullcontext

import pytest

from nanovllm.garbage_collector import collector_off


class Cycle:
    def __init__(self):
        self.itself = self


def full_collections():
    return gc.get_stats()[2]["collections"]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_once_at_the_end_and_not_within(fails):
    before = full_collections()
    cycles = weakref.WeakSet()
    with pytest.raises(RuntimeError) if fails else nullcontext():
        with collector_off(gc.collect):
            for _ in range(200_000):  # enough for a hundred collections
                held = Cycle()
                cycles.add(held)
            assert not gc.isenabled() and full_collections() == before and len(cycles) == 200_000
            if fails:
                raise RuntimeError
    assert gc.isenabled() and full_collections() == before + 1 and len(cycles) <= 1  # held


def test_what_is_frozen_is_not_looked_at_again():
    try:
        with collector_off(gc.freeze):
            cycle = weakref.ref(Cycle())
        gc.collect()
        assert gc.isenabled() and cycle() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    assert cycle() is None


def test_a_collector_that_is_off_is_left_as_it_is():
    gc.disable()
    try:
        with collector_off(lambda: pytest.fail("called")):
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
