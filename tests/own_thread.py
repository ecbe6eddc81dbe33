"""Calls in a thread of their own, for tests whose trace function raises."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(call: Callable[[], T]) -> T:
    """Call in a new thread, and return or raise here what that gives.

    A trace function that raises at the last line of an `except` leaves the exception there as the one that the thread
    handles, for good (Python 3.11): `__context__` of every later exception in that thread would name it.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
