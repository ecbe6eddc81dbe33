"""What `nanovllm chat` and `nanovllm generate` show until an answer begins."""

from __future__ import annotations

from collections.abc import Iterator

from nanovllm.console import working


def awaited(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of an answer. Until the first one a status line says so, since a long prompt takes seconds."""
    with working("Computing the first token ...", timed=True):
        first = next(pieces, "")
    yield first
    yield from pieces
