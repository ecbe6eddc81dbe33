"""Python's garbage collector around work that makes many objects which stay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collector_off(at_the_end: Callable[[], object]) -> Iterator[None]:
    """Within the block the collector is off.

    Importing PyTorch and loading a model make some 200,000 objects, which stay. The collector would go through all of
    them several times meanwhile. A collector that the user has switched off stays off, and nothing is called.

    Args:
        at_the_end: `gc.freeze`, after which the collector never looks at these objects again, not even when the program
            exits; or `gc.collect`, which frees the block's garbage now and not while requests wait.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        at_the_end()
        gc.enable()
