"""Clients share a thread."""

import threading
import time

import pytest

from nanovllm.frontend.fair_thread import FairThread


def test_clients_take_turns_each_with_its_oldest_call():
    thread, go, ran = FairThread("shared"), threading.Event(), []
    calls = [thread.submit("a", go.wait, 300)]
    while not calls[0].running():
        time.sleep(0.001)
    for client, number in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("c", 1)]:
        calls.append(thread.submit(client, ran.append, (client, number)))
    calls[2].cancel()
    go.set()
    for call in calls:
        assert call.cancelled() or call.exception(300) is None
    assert ran == [("a", 1), ("b", 1), ("c", 1), ("b", 2), ("a", 3)]
    assert isinstance(thread.submit("a", int, "x").exception(300), ValueError)
    thread.close()
    with pytest.raises(RuntimeError):
        thread.submit("a", int)


def test_a_close_cancels_what_waits():
    thread, go = FairThread("shared"), threading.Event()
    runs = thread.submit("a", go.wait, 300)
    while not runs.running():
        time.sleep(0.001)
    waits = thread.submit("a", int)
    threading.Timer(0.1, go.set).start()
    thread.close()
    assert runs.result() is True and waits.cancelled()
