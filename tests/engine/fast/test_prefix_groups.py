"""Groups of sequences that share leading blocks: against a search through all choices, and under random load."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.fast.decode_state import DecodeState
from nanovllm.engine.fast.prefix_groups import PrefixGroups, find_groups
from nanovllm.engine.fast.step_shape import DecodeBuckets
from nanovllm.engine.step import StepKind
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.ops.shared_prefixes import check_shared
from tests.engine.fast import test_decode_state as decode_state_tests
from tests.engine.simulation import Simulation, random_load

# ------------------------------------------------------------------------------------------------ what the groups are


def best_saving(prefixes):
    """(most blocks saved, fewest groups that save so many) by disjoint choices of `prefixes`: (blocks, rows)."""
    if not prefixes:
        return 0, 0
    (blocks, rows), others = prefixes[0], prefixes[1:]
    saved, count = best_saving([p for p in others if not p[1] & rows])
    return min(best_saving(others), (saved + blocks * (len(rows) - 1), count + 1), key=lambda x: (-x[0], x[1]))


def every_prefix(tables, limits):
    found = {}
    for row, table in enumerate(tables):
        for blocks in range(1, limits[row] + 1):
            found.setdefault(tuple(table[:blocks]), set()).add(row)
    longest = {
        frozenset(rows): len(prefix) for prefix, rows in sorted(found.items(), key=lambda x: len(x[0])) if len(rows) > 1
    }
    return [(blocks, rows) for rows, blocks in longest.items()]


def check_groups(groups, tables, limits):
    seen = set()
    for blocks, rows in groups:
        assert blocks > 0 and len(rows) > 1 and rows.tolist() == sorted(set(rows.tolist()))
        assert not seen & set(rows.tolist())
        seen |= set(rows.tolist())
        assert all(
            blocks <= limits[row] and list(tables[row][:blocks]) == list(tables[rows[0]][:blocks]) for row in rows
        )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=8)
)
def test_the_groups_save_most(rows):
    """Block 0 among them, whose bytes are zero."""
    tables, limits = np.array([table for table, _ in rows], np.int32), np.array([limit for _, limit in rows])
    before = tables.copy()
    groups = find_groups(tables, limits)
    check_groups(groups, tables, limits)
    saved, count = best_saving(every_prefix(tables.tolist(), limits.tolist()))
    assert (sum(group.saved for group in groups), len(groups)) == (saved, count)
    assert [g.saved for g in groups] == sorted((g.saved for g in groups), reverse=True)
    assert [(g.blocks, g.rows.tolist()) for g in find_groups(tables, limits, 1)] == [
        (g.blocks, g.rows.tolist()) for g in groups[:1]
    ]
    assert (tables == before).all()


def test_block_numbers_of_several_bytes():
    """Rows that differ in one byte of a block's number alone, and in nothing but the limit."""
    tables = np.array(
        [[256, 7, 1], [256, 7, 65537], [1, 7, 1], [0, 256, 1], [256, 7, 65537], [0, 1, 1], [1 << 24, 7, 1]], np.int32
    )
    groups = find_groups(tables, np.array([3, 3, 3, 3, 3, 3, 3]))
    assert [(g.blocks, g.rows.tolist()) for g in groups] == [(2, [0, 1, 4]), (1, [3, 5])]
    groups = find_groups(tables, np.array([1, 3, 3, 0, 3, 3, 3]))
    assert [(g.blocks, g.rows.tolist()) for g in groups] == [(3, [1, 4])]
    assert find_groups(tables[:0], np.zeros(0, int)) == [] and find_groups(tables, np.zeros(7, int)) == []


def test_a_common_system_prompt_and_longer_prefixes_of_some():
    """One block of all, or eight blocks of four pairs each: pairs save more, until there are enough who share the
    one.
    """
    tables = np.arange(200 * 9, dtype=np.int32).reshape(200, 9) + 1
    tables[:, 0] = 0
    for pair in range(0, 8, 2):
        tables[pair + 1, :8] = tables[pair, :8]
    limits = np.full(200, 8)
    assert [g.rows.tolist() for g in find_groups(tables[:30], limits[:30])] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    (group,) = find_groups(tables, limits)
    assert group.blocks == 1 and len(group.rows) == 200


# ------------------------------------------------------------------------------------------------ under load


class Watched(PrefixGroups):
    """Compares what it keeps with a search through all choices whenever rows change hands."""

    updates, found = 0, 0

    def update(self, num_rows, positions):
        super().update(num_rows, positions)
        self.updates += 1
        seqs = self.state.seqs
        tables = [seq.block_table for seq in seqs]
        limits = [int(p) // self._block_size for p in positions[:num_rows]]
        check_groups(self.groups, tables, limits)
        saved, count = best_saving(every_prefix(tables, limits))
        assert (sum(g.saved for g in self.groups), len(self.groups)) == (saved, count)
        assert self.worthwhile == (saved > 0)
        self.found += count


class SharingDevice(decode_state_tests.StateDevice):
    def __init__(self, block_size, max_blocks):
        super().__init__(block_size, max_blocks)
        paged = decode_state_tests.paged_model(block_size=block_size, max_blocks=max_blocks)
        prefixes = Watched(paged, 1, 2, 1)  # whatever is shared is worth it
        self.state = prefixes.state = DecodeState(paged, prefixes=prefixes)
        self.state.last_tokens = paged.last_tokens
        self.shared = 0

    def execute(self, step):
        tokens = super().execute(step)
        state = self.state
        if step.kind is StepKind.DECODE and state.prefixes.worthwhile:
            # `super` has advanced the state: the step's tokens are the last of these lengths but one.
            m = state.batch(decode_state_tests.MAX_SEQS, 1, shared=True).metadata
            n = state.num_rows
            lens = m.context_lens - (torch.arange(len(m.context_lens)) < n).int()
            cache = torch.empty(decode_state_tests.PADDING + 1, state.block_size, 1, 1)
            shared = m.shared
            check_shared(PagedKV(cache, cache, m.block_table, lens, 100), shared)
            assert not shared.shared_lens[n:].any() and shared.shared_lens.any()
            self.shared += 1
        return tokens


@pytest.mark.parametrize("seed", range(20))
def test_groups_follow_arrivals_and_departures(seed):
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    max_blocks = -(-24 // block_size)
    sim = Simulation(
        block_size=block_size, max_model_len=24, num_blocks=max_blocks + rng.randint(0, 14),
        max_num_seqs=rng.randint(2, decode_state_tests.MAX_SEQS), budget=rng.randint(8, 30), steps_ahead=rng.randint(0,
        1),
    )  # fmt: skip
    sim.device = SharingDevice(block_size, max_blocks)
    random_load(sim, rng)
    prefixes = sim.device.state.prefixes
    assert sim.device.steps > prefixes.updates > 0
    if seed == 0:
        assert sim.device.shared and prefixes.found


def four_tables(min_rows=2, min_saved_bytes=1):
    """Four rows with blocks of four tokens of a byte each."""
    paged = decode_state_tests.paged_model(max_num_seqs=4, max_blocks=3)
    prefixes = PrefixGroups(paged, 1, min_rows, min_saved_bytes)
    for row, blocks in enumerate(([5, 6, 7], [5, 6, 8], [1, 2], [5, 3])):
        prefixes.set_table(row, np.array(blocks))
    return prefixes


def test_few_rows_and_small_savings_are_left_alone():
    for min_rows, min_bytes, groups, worthwhile in ((4, 8, 1, True), (4, 9, 1, False), (5, 8, 0, False)):
        prefixes = four_tables(min_rows, min_bytes)
        prefixes.update(4, np.array([9, 7, 6, 7]))
        assert len(prefixes.groups) == groups and prefixes.worthwhile is worthwhile


def test_groups_are_sent_where_they_changed():
    prefixes = four_tables()
    positions = np.array([9, 10, 6, 7])
    prefixes.update(3, positions)
    m = prefixes.tensors(4)
    assert m.groups[0].tolist() == [0, 2, 8] and not m.groups[1:].any()
    assert m.group_rows[:2].tolist() == [0, 1] and m.shared_lens.tolist() == [8, 8, 0, 0]
    tensors = m.groups, m.group_rows, m.shared_lens
    before = [t.clone() for t in tensors]
    for t in tensors:
        t.fill_(-7)
    prefixes.update(3, positions + 1)
    assert all((t == -7).all() for t in tensors)  # nothing had changed
    prefixes.reset()
    assert not prefixes.worthwhile
    prefixes.update(3, positions)
    assert all(map(torch.equal, tensors, before))
    prefixes.update(4, positions)
    assert [(g.blocks, g.rows.tolist()) for g in prefixes.groups] == [(1, [0, 1, 3])]  # two blocks of two save as much
    prefixes.update(4, np.array([9, 7, 6, 7]))  # the second computes a token of its second block
    assert (
        m.groups[0].tolist() == [0, 3, 4]
        and m.group_rows[:3].tolist() == [0, 1, 3]
        and m.shared_lens.tolist() == [4, 4, 0, 4]
    )


def test_captures_of_steps_that_share():
    assert DecodeBuckets(256, 4096).shared_sizes == []
    assert DecodeBuckets(256, 4096, False, 16).shared_sizes == [16 * i for i in range(1, 17)]
    assert DecodeBuckets(11, 4096, False, 16).shared_sizes == []
    assert DecodeBuckets(20, 4096, False, 16).shared_sizes == [16, 20]
