"""Work that runs beside other work on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch


@contextmanager
def fork(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A stream beside the current one, or None where there are no streams.

    What is launched on it (`with torch.cuda.stream(...)`, which takes None as well) comes after all that was launched before, and
    runs beside what is launched on the current stream; after this context both have run. A CUDA graph captures both branches.

    A tensor that is created on one of them must not be used on the other before the end, nor live past it.
    """
    if device.type != "cuda":
        yield None
        return
    here = torch.cuda.current_stream(device)
    side = _beside(here)
    side.wait_stream(here)
    try:
        yield side
    except BaseException:
        with suppress(RuntimeError):  # what spoiled a capture says how; that nothing can join it any more does not
            here.wait_stream(side)
        raise
    here.wait_stream(side)


@cache
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each, so that engines in several threads share none."""
    return torch.cuda.Stream(stream.device)
