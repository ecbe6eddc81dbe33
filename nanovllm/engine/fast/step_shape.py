"""The shapes that decode steps are padded to, and the key by which a captured one is found."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from nanovllm.engine.fast.piggyback import Piggyback

_MOST_ROWS_IN_ONE_GRAPH = 32


class SamplingMode(IntEnum):
    """What sampling a batch needs: what its most demanding row needs."""

    GREEDY = 0
    PLAIN = 1
    """Temperature."""
    FILTERED = 2
    """top-k, top-p or min-p as well."""
    GENERAL = 3
    """Penalties, bias, banned tokens or log-probabilities, which the decode state has no place for."""


class StepShape(NamedTuple):
    """All that the launches of a decode step depend on."""

    rows: int
    """Sequences, padding included."""
    context: int = 0
    """A bound on the context lengths. 0: only sampling, from the static logits."""
    shared: bool = False
    """Whether attention reads blocks that several sequences share once (`prefix_groups.py`)."""
    piggybacked: int = 0
    """Tokens of prompts that are computed as well, padding included."""
    mode: SamplingMode | None = None
    """How to sample; None: the step ends with the logits."""


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes: 1, 2, 4, 8, then steps of about an eighth; the last is `max_num_seqs`, so none is missed."""
    sizes = {s for s in (1, 2, 4, 8) if s < max_num_seqs}
    size = 16
    while size < max_num_seqs:
        sizes.add(size)
        size += 16 if size < 256 else 32 if size < 512 else size // 8
    return sorted(sizes | {max_num_seqs})


def context_buckets(max_model_len: int) -> list[int]:
    """Bounds on the context length: powers of two from 512; the last is `max_model_len`."""
    sizes = []
    size = 512
    while size < max_model_len:
        sizes.append(size)
        size *= 2
    return [*sizes, max_model_len]


class DecodeBuckets:
    """The sizes that decode batches are padded to, with or without graphs, so that both compute the same thing.

    Args:
        by_context: use several bounds on the context lengths, for attention whose time grows with the bound.
        min_shared_rows: rows from which on there are steps that attend to shared prefixes once; None: there are none.
        piggyback: the sizes of steps with piggybacked prompts; None: there are none.
        form_changes: numbers of tokens from which on layers multiply with another form of their weights.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        by_context: bool = True,
        min_shared_rows: int | None = None,
        piggyback: Piggyback | None = None,
        form_changes: Iterable[int] = (),
    ) -> None:
        self.by_context = by_context
        self.batch_sizes = batch_buckets(max_num_seqs)
        below = [[size for size in self.batch_sizes if size < change] for change in form_changes]
        self.largest_of_forms = {sizes[-1] for sizes in below if sizes}
        """The largest batch before each change of the form of weights."""
        self.context_lens = context_buckets(max_model_len) if by_context else [max_model_len]
        self.longest = max_model_len
        self.shared_sizes: list[int] = []
        if min_shared_rows is not None:
            self.shared_sizes = [size for size in self.batch_sizes if size >= min_shared_rows]
        self.piggybacked_sizes: list[tuple[int, int]] = []
        """(rows, tokens of prompts)"""
        if piggyback is not None:
            rows = sorted({piggyback.padded_rows(size) for size in self.batch_sizes})
            self.piggybacked_sizes = [(n, tokens) for n in rows for tokens in piggyback.token_counts(n)]
        # By context there would be many more graphs, of a slow kernel.
        self.one_graph_sizes = [size for size in self.batch_sizes if size <= _MOST_ROWS_IN_ONE_GRAPH and not by_context]

    def fit(self, num_seqs: int, max_context_len: int) -> tuple[int, int]:
        """The smallest (batch size, context length) that holds a batch."""
        return (
            self.batch_sizes[bisect_left(self.batch_sizes, num_seqs)],
            self.context_lens[bisect_left(self.context_lens, max_context_len)],
        )
