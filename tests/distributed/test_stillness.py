"""Whether a thread moves, as another one sees it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanovllm.distributed.processes import Processes
from nanovllm.distributed.stillness import Stillness

SECONDS = 120
"""A wait that lasts longer is a hang."""


def waits_for_a_lock(end):
    end.wait()


def waits_for_a_thread(end):
    with ThreadPoolExecutor(1) as executor:
        executor.submit(end.wait).result()


@pytest.mark.parametrize("wait, moves", [(waits_for_a_lock, False), (waits_for_a_thread, True)])
def test_a_thread_that_waits_for_threads_of_a_pool_counts_as_one_that_moves(wait, moves):
    """Such as those that compile all kernels at a first start, which takes longer than ranks may be still. A thread
    that waits for something else may be one of a pool itself.
    """
    end, stillness = threading.Event(), Stillness()
    with ThreadPoolExecutor(1) as executor:
        thread = executor.submit(threading.get_ident).result()
        executor.submit(wait, end)
        hang = time.monotonic() + SECONDS
        while True:
            time.sleep(0.2)
            for _ in range(4):
                stillness.look(thread)
                time.sleep(0.05)
            # A busy machine may let the thread begin late.
            if (stillness.seconds == 0.0) == moves or time.monotonic() > hang:
                break
        end.set()
    assert (stillness.seconds == 0.0) == moves


def test_ranks_that_wait_at_the_same_place_in_each_step_go_on():
    """As in a long run of decode steps. The other rank tells nothing of itself, and counts as still."""
    processes = Processes("tests.distributed.spmd", 2, {"STILL_SECONDS": ""}, lambda: None, still_seconds=3.2)
    try:  # a pause of the whole machine counts as three seconds
        begin = time.monotonic()
        while time.monotonic() < begin + 4:
            processes.watch(True)
            time.sleep(0.02)
            processes.watch(False)
        assert processes.failure is None
        processes.watch(True)  # one step that does not end
        while processes.failure is None and time.monotonic() < begin + SECONDS:
            time.sleep(0.05)
        assert "none has moved for 3.2 s" in (processes.failure or "")
    finally:
        processes.close()
