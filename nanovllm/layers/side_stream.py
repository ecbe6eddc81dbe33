"""Work that runs at the same time as other work on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A second stream, besides the current one; None on a device without streams.

    What is launched on it (`with torch.cuda.stream(...)`, which takes None as well) runs after all that was launched
    before this context, and at the same time as what is launched on the current stream within it. After this context
    both have run. A CUDA graph captures both branches.

    A tensor that is created on one of the streams must not be used on the other within the context, nor live longer
    than it.
    """
    if device.type != "cuda":
        yield None
        return
    current = torch.cuda.current_stream(device)
    side = _side_of(current)
    side.wait_stream(current)
    try:
        yield side
    except BaseException:
        with suppress(RuntimeError):  # a capture that failed cannot be joined; the error that made it fail is raised
            current.wait_stream(side)
        raise
    current.wait_stream(side)


@cache
def _side_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One side stream for each stream, so that engines in several threads share none."""
    return torch.cuda.Stream(stream.device)
