"""One call at a time: a second one is an error in any thread, and whatever ends the first one, the next may run."""

import threading

import pytest

from nanovllm.engine.reentrancy_guard import ReentrancyGuard


def test_a_call_inside_of_a_call_is_an_error_and_the_outer_one_goes_on():
    guard = ReentrancyGuard("not twice")

    def outer():
        with pytest.raises(RuntimeError, match="not twice"):
            guard.run(lambda: 1)
        return 2

    assert guard.run(outer) == 2 and guard.run(lambda: 3) == 3


def test_a_call_of_another_thread_is_an_error_while_one_runs():
    guard, raised = ReentrancyGuard("not twice"), []

    def other():
        try:
            guard.run(lambda: 1)
        except RuntimeError as error:
            raised.append(str(error))

    def outer():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    guard.run(outer)
    other()
    assert raised == ["not twice"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_failure_the_next_call_runs(error):
    guard = ReentrancyGuard("not twice")

    def fail():
        raise error

    with pytest.raises(error):
        guard.run(fail)
    assert guard.run(lambda: 1) == 1
