"""Work that runs at the same time as other work on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A second stream beside the current one; None on a device without streams.

    Kernels on it (`with torch.cuda.stream(...)`, which takes None as well) run after all kernels that were launched
    before this context, and at the same time as kernels on the current stream within the context. Kernels after the
    context wait for both. A CUDA graph captures both branches.

    A tensor that is created on one stream must not be used on the other within the context, nor outlive it.
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
