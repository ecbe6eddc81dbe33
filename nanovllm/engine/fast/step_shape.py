"""The shapes that decode steps are padded to, and the key by which a captured one is found.

A graph has fixed shapes, so there is one for each of a few batch sizes, and a batch is padded to the next larger one.
The reference's attention does work in proportion to the bound on the context length, so for it there are a few of these
bounds as well; a kernel that reads the lengths on the device needs only the largest.

A captured step is two graphs, the model up to the logits, then sampling and the state's advance: what sampling a batch
needs changes from step to step, and capturing the model again for each kind of sampling takes time. One graph saves the
4 us between two and a copy of the logits, 2 us, which is worth it where a step is short: small batches have graphs of
whole steps as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from nanovllm.engine.fast.piggyback import Piggyback

_MOST_ROWS_IN_ONE_GRAPH = 32
_LARGEST_SMALL_BATCH = 64


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

    @property
    def model(self) -> StepShape:
        """The step's first part, up to the logits."""
        return StepShape(self.rows, self.context, self.shared, self.piggybacked)

    @property
    def sampling(self) -> StepShape:
        """The step's second part, from the logits on."""
        return StepShape(self.rows, mode=self.mode)


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
        modes: the kinds of sampling that are captured.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        by_context: bool = True,
        min_shared_rows: int | None = None,
        piggyback: Piggyback | None = None,
        form_changes: Iterable[int] = (),
        modes: Sequence[SamplingMode] = (),
    ) -> None:
        self.by_context = by_context
        self._modes = modes
        self.batch_sizes = batch_buckets(max_num_seqs)
        below = [[size for size in self.batch_sizes if size < change] for change in form_changes]
        largest_of_forms = {sizes[-1] for sizes in below if sizes}
        self._small_sizes = [n for n in self.batch_sizes if n <= _LARGEST_SMALL_BATCH or n in largest_of_forms]
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

    def fit(self, num_seqs: int, max_context_len: int) -> tuple[int, int]:
        """The smallest (batch size, context length) that holds a batch."""
        return (
            self.batch_sizes[bisect_left(self.batch_sizes, num_seqs)],
            self.context_lens[bisect_left(self.context_lens, max_context_len)],
        )

    def every_shape(self) -> list[StepShape]:
        """What may be captured, with the largest of several bounds on the context lengths."""
        return [
            *(StepShape(rows, self.longest) for rows in self.batch_sizes),
            *self._lazily_captured(),
            *(StepShape(rows, mode=mode) for rows in self.batch_sizes for mode in self._modes),
        ]

    def first_shapes(self) -> list[StepShape]:
        """The shapes whose first call creates, compiles or measures something. Small batches may have other kernels,
        and so may the largest batch before each change of the form of weights.
        """
        largest = self.batch_sizes[-1]
        return [
            StepShape(largest, self.longest),
            *(StepShape(rows, self.context_lens[0]) for rows in self._small_sizes),
            *self._lazily_captured(),
            *(StepShape(largest, mode=mode) for mode in self._modes),
        ]

    def _lazily_captured(self) -> list[StepShape]:
        """Shapes of which most engines see few: they are captured when the first batch of their size comes. Of the
        first kind the largest is captured when the engine starts.
        """
        return [
            *(StepShape(rows, self.longest, shared=True) for rows in self.shared_sizes),
            *(StepShape(rows, self.longest, piggybacked=tokens) for rows, tokens in self.piggybacked_sizes),
        ]

    def shapes_at_start(self) -> list[StepShape]:
        """What is captured when the engine starts: the largest first, so that smaller ones fit into the memory that
        these have.
        """
        sizes, contexts, modes = self.batch_sizes[::-1], self.context_lens[::-1], self._modes
        # By context there would be many more graphs of whole steps, of a slow kernel.
        whole = [rows for rows in sizes if rows <= _MOST_ROWS_IN_ONE_GRAPH and not self.by_context]
        return [
            *(StepShape(rows, context) for rows in sizes for context in contexts),
            *(StepShape(rows, self.longest, shared=True) for rows in self.shared_sizes[-1:]),
            *(StepShape(rows, mode=mode) for rows in sizes for mode in modes),
            *(StepShape(rows, self.longest, mode=mode) for rows in whole for mode in modes),
        ]
