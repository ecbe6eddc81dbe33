"""Which sequences of a decode batch share leading blocks, and whether attending to these once is worth it.

Sequences that share a prefix have the same blocks there (prefix cache hits, n > 1), so block tables say all. They are
compared when sequences come or go, and never while a run continues: a table only grows at its end, by unshared blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Blocks that need not be read."""
        return self.blocks * (len(self.rows) - 1)


def find_groups(tables: np.ndarray, limits: np.ndarray, most: int = MAX_GROUPS) -> list[PrefixGroup]:
    """The disjoint groups that together save most blocks, at equal savings the larger ones; at most `most` of them.

    Args:
        tables: [n, max_blocks] int32, by row: block numbers from 0 on.
        limits: [n] how many leading blocks of each row may be shared; what lies behind them in its table is not looked
            at.
    """
    rows = np.flatnonzero(limits > 0)
    _, inverse, counts = np.unique(tables[rows, 0], return_inverse=True, return_counts=True)
    rows = rows[counts[inverse] > 1]
    if not len(rows):
        return []
    limits = limits[rows]
    width = int(limits.max())
    keys = np.ascontiguousarray(tables[rows, :width])
    np.copyto(keys, (-1 - rows[:, None]).astype(np.int32), where=np.arange(width) >= limits[:, None])
    # As strings of bytes: any order that puts equal beginnings side by side will do.
    order = np.argsort(keys.view(f"S{4 * width}")[:, 0], kind="stable")
    rows, keys = rows[order], keys[order]
    differs = keys[1:] != keys[:-1]
    common = np.where(differs.any(1), differs.argmax(1), width).tolist()
    groups = [PrefixGroup(blocks, np.sort(rows[start:end])) for start, end, blocks in _best(common)]
    groups.sort(key=lambda group: (-group.saved, group.rows[0]))
    return groups[:most]


def _best(common: list[int]) -> list[tuple[int, int, int]]:
    """(start, end, blocks) of the best groups of sorted tables; `common` has the number of leading blocks that each
    table shares with the next.

    The runs of tables with a prefix in common are a tree: the runs inside of one have a longer prefix in common. What
    saves most inside of a run is the run itself, or the best of those inside of it together.
    """
    found: list[tuple[int, int, int]] = []
    stack = [(0, 0, 0, found)]  # of open runs: blocks, start, what the runs inside of it save, and which they are
    for end, blocks in enumerate([*common, 0], 1):
        inside: list[tuple[int, int, int]] = []
        start, saved = end - 1, 0
        while stack[-1][0] > blocks:
            run_blocks, start, saved, inside = stack.pop()
            own = run_blocks * (end - start - 1)
            if own >= saved:
                saved, inside = own, [(start, end, run_blocks)]
            if stack[-1][0] >= blocks:
                outer_blocks, outer_start, outer_saved, outer = stack[-1]
                outer.extend(inside)
                stack[-1] = outer_blocks, outer_start, outer_saved + saved, outer
        if stack[-1][0] < blocks:
            stack.append((blocks, start, saved, inside))
    return found


class PrefixGroups:
    """The groups of the decode state's rows, on the device, for `AttentionMetadata.shared`.

    Args:
        token_bytes: that a token takes in the cache of a layer.
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
        self._device = torch.zeros(3 * MAX_GROUPS + 2 * max_num_seqs, dtype=torch.int32, device=device)
        self._sent = np.zeros(len(self._device), np.int32)
        self.groups: Sequence[PrefixGroup] = ()
        """The groups of the placed rows, whether they are used or not."""
        self.worthwhile = False
        """Whether the next step uses the groups. If not, `tensors` is out of date."""

    def set_table(self, row: int, blocks: np.ndarray) -> None:
        """The row has these blocks in its table."""
        self._tables[row, : len(blocks)] = blocks

    def update(self, num_rows: int, positions: np.ndarray) -> None:
        """The first `num_rows` rows have other sequences; they compute the tokens at `positions` next.

        Only blocks before the token's block are shared, since the step writes to that one.
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
        host = torch.zeros(len(self._sent), dtype=torch.int32, pin_memory=self._device.is_cuda)
        groups, rows, lens = self._parts(host.numpy())
        place = 0
        for i, group in enumerate(self.groups):
            groups[i] = place, len(group.rows), group.blocks * self._block_size
            rows[place : place + len(group.rows)] = group.rows
            lens[group.rows] = group.blocks * self._block_size
            place += len(group.rows)
        if not np.array_equal(host.numpy(), self._sent):
            self._device.copy_(host, non_blocking=True)
            self._sent[:] = host.numpy()

    def tensors(self, num_rows: int) -> SharedPrefixes:
        """The groups of the first `num_rows` rows, as views, so that a captured graph stays right."""
        groups, rows, lens = self._parts(self._device)
        return SharedPrefixes(groups, rows[:num_rows], lens[:num_rows])

    def _parts(self, flat: Any) -> tuple[Any, Any, Any]:
        end = 3 * MAX_GROUPS
        return flat[:end].reshape(MAX_GROUPS, 3), flat[end : end + self._size], flat[end + self._size :]
