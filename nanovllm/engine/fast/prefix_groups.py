"""Which sequences of a decode batch share leading blocks, and whether attending to these once is worth it.

Sequences that share a prefix have the same blocks there (prefix cache hits, n > 1), so comparing block tables finds
them. They are compared when sequences come or go, and never while the same sequences decode on: a table only grows at
its end, by unshared blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.paged_model import PagedModel
from nanovllm.layers.attention import SharedPrefixes

MAX_GROUPS = 64


class PrefixGroup(NamedTuple):
    """Rows that have their first `blocks` blocks in common."""

    blocks: int
    rows: np.ndarray
    """Ascending."""

    @property
    def saved(self) -> int:
        """Block reads that the group saves: a shared block is read once, not once for each row."""
        return self.blocks * (len(self.rows) - 1)


def find_groups(tables: np.ndarray, limits: np.ndarray, most: int = MAX_GROUPS) -> list[PrefixGroup]:
    """The disjoint groups that together save most blocks, at equal savings the larger ones; at most `most` of them.

    Args:
        tables: [n, max_blocks] int32, by row: block numbers from 0 on.
        limits: [n] how many leading blocks of each row may be shared; later blocks of its table are not compared.
    """
    rows = np.flatnonzero(limits > 0)
    _, inverse, counts = np.unique(tables[rows, 0], return_inverse=True, return_counts=True)
    rows = rows[counts[inverse] > 1]  # the others share no first block, so they share nothing
    if not len(rows):
        return []
    limits = limits[rows]
    width = int(limits.max())
    keys = np.ascontiguousarray(tables[rows, :width])
    # A row has a negative number of its own in place of each block that it may not share.
    np.copyto(keys, (-1 - rows[:, None]).astype(np.int32), where=np.arange(width) >= limits[:, None])
    # Sorted as strings of bytes: any order does that puts rows with equal leading blocks side by side.
    order = np.argsort(keys.view(f"S{4 * width}")[:, 0], kind="stable")
    rows, keys = rows[order], keys[order]
    differs = keys[1:] != keys[:-1]
    common = np.where(differs.any(1), differs.argmax(1), width).tolist()
    groups = [PrefixGroup(blocks, np.sort(rows[start:end])) for start, end, blocks in _best_groups(common)]
    groups.sort(key=lambda group: (-group.saved, group.rows[0]))
    return groups[:most]


@dataclass(slots=True)
class _Run:
    """Consecutive sorted rows, from `start` on, that have their first `blocks` blocks in common."""

    blocks: int
    start: int
    saved: int = 0
    """Blocks that `groups` save."""
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, blocks) of the best groups so far in this run."""


def _best_groups(common: list[int]) -> list[tuple[int, int, int]]:
    """(start, end, blocks) of the groups of sorted rows that save most.

    Runs are nested: rows that share a longer prefix are a run inside of the run that shares a shorter one. When a run
    has ended, its best groups are either the whole run as one group, or the best groups of the runs inside of it.

    Example: common = [3, 1, 2, 2]. Rows 0 and 1 share 3 blocks, rows 2 to 4 share 2, and all five share 1. All as one
    group save 1 * 4 blocks; the two groups inside save 3 * 1 + 2 * 2. The result is [(0, 2, 3), (2, 5, 2)].

    Args:
        common: for each row the number of leading blocks that it shares with the next one.
    """
    open_runs = [_Run(0, 0)]  # the runs that the row and the next one are in, from the outermost on
    for row, blocks in enumerate([*common, 0]):
        while open_runs[-1].blocks > blocks:  # this run ends with the row
            run = open_runs.pop()
            saved_as_one = run.blocks * (row - run.start)
            if saved_as_one >= run.saved:
                run.saved, run.groups = saved_as_one, [(run.start, row + 1, run.blocks)]
            if open_runs[-1].blocks < blocks:
                open_runs.append(_Run(blocks, run.start))  # the ended run begins a longer one, of fewer blocks
            open_runs[-1].saved += run.saved
            open_runs[-1].groups += run.groups
        if open_runs[-1].blocks < blocks:
            open_runs.append(_Run(blocks, row))
    return open_runs[0].groups


class PrefixGroups:
    """The groups of the decode state's rows, on the device, for `AttentionMetadata.shared`.

    Args:
        token_bytes: bytes of a token in the cache of a layer.
        min_rows: batches of fewer sequences have no groups.
        min_saved_bytes: bytes of a layer's cache that groups must save in a step to be used.
    """

    def __init__(self, paged: PagedModel, token_bytes: int, min_rows: int, min_saved_bytes: int) -> None:
        max_num_seqs, device = paged.max_num_seqs, paged.device
        self._block_size = paged.block_size
        self._block_bytes = paged.block_size * token_bytes
        self._min_rows, self._min_saved_bytes = min_rows, min_saved_bytes
        self._tables = np.zeros((max_num_seqs, paged.max_blocks), np.int32)
        self._size = max_num_seqs
        self._on_device = torch.zeros(3 * MAX_GROUPS + 2 * max_num_seqs, dtype=torch.int32, device=device)
        self._sent = np.zeros(len(self._on_device), np.int32)
        self.groups: Sequence[PrefixGroup] = ()
        """The groups of the placed rows, whether they are used or not."""
        self.worthwhile = False
        """Whether the next step uses the groups. If not, `tensors` is out of date."""

    def set_table(self, row: int, blocks: np.ndarray) -> None:
        """The row has these blocks in its table."""
        self._tables[row, : len(blocks)] = blocks

    def update(self, num_rows: int, positions: np.ndarray) -> None:
        """Find the groups anew, since the first `num_rows` rows have other sequences. positions: of the tokens that
        they compute next. Only blocks before the token's block are shared, since the step writes to that one.
        """
        self.groups = ()
        if num_rows >= self._min_rows:
            self.groups = find_groups(self._tables[:num_rows], positions[:num_rows] // self._block_size)
        self.worthwhile = sum(group.saved for group in self.groups) * self._block_bytes >= self._min_saved_bytes
        if self.worthwhile:
            self.send()

    def reset(self) -> None:
        """Forget the groups, and what was sent to the device."""
        self._sent[:] = -1
        self.groups, self.worthwhile = (), False

    def send(self) -> None:
        """Copy the groups to the device, if they differ from those sent last."""
        host = torch.zeros(len(self._sent), dtype=torch.int32, pin_memory=self._on_device.is_cuda)
        groups, rows, lens = self._parts(host.numpy())
        start = 0
        for i, group in enumerate(self.groups):
            end, shared_len = start + len(group.rows), group.blocks * self._block_size
            groups[i] = start, len(group.rows), shared_len
            rows[start:end] = group.rows
            lens[group.rows] = shared_len
            start = end
        if not np.array_equal(host.numpy(), self._sent):
            self._on_device.copy_(host, non_blocking=True)
            self._sent[:] = host.numpy()

    def tensors(self, num_rows: int) -> SharedPrefixes:
        """The groups of the first `num_rows` rows, as views, so that a captured graph stays right."""
        groups, rows, lens = self._parts(self._on_device)
        return SharedPrefixes(groups, rows[:num_rows], lens[:num_rows])

    def _parts(self, flat: Any) -> tuple[Any, Any, Any]:
        """The fields of `SharedPrefixes` in a tensor or array of one dimension, as views."""
        end = 3 * MAX_GROUPS
        return flat[:end].reshape(MAX_GROUPS, 3), flat[end : end + self._size], flat[end + self._size :]
