"""The block manager: reference counts, prefix sharing, and the order in which blocks are used again."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK = 4


def make(token_ids, cache_salt=None, **params):
    return Sequence(0, list(token_ids), SamplingParams(**params), seed=0, cache_salt=cache_salt)


def compute(manager, seq, num_tokens=None):
    """Admit, if it holds nothing yet, and compute up to `num_tokens`: what the scheduler does with a sequence."""
    num_tokens = seq.num_tokens if num_tokens is None else num_tokens
    if not seq.block_table:
        prefix = manager.match_prefix(seq)
        assert manager.fits(prefix, num_tokens)
        manager.admit(seq, prefix, num_tokens)
    else:
        assert manager.grow(seq, num_tokens)
    seq.num_computed_tokens = num_tokens
    manager.register(seq, num_tokens)
    return seq


def run_and_free(manager, token_ids):
    seq = compute(manager, make(token_ids))
    blocks = list(seq.block_table)
    manager.free(seq)
    manager.check([])
    return blocks


def test_grow_is_all_or_nothing():
    manager = BlockManager(3, BLOCK)
    seq = compute(manager, make(range(4)))
    assert not manager.grow(seq, 13)
    assert len(seq.block_table) == 1 and manager.num_free_blocks == 2
    assert manager.grow(seq, 12) and manager.grow(seq, 5)  # the second needs nothing
    assert len(seq.block_table) == 3
    manager.check([seq])


def test_a_free_block_of_the_prefix_is_not_counted_twice():
    manager = BlockManager(3, BLOCK)
    first = compute(manager, make(range(9)))
    manager.free(first)
    other = compute(manager, make(range(100, 105)))  # takes two of the three
    seq = make([*range(4), *range(50, 58)])
    prefix = manager.match_prefix(seq)
    assert len(prefix) == 1
    # One block is free, and it is the prefix itself.
    assert manager.num_free_blocks == 1 and not manager.fits(prefix, 12)
    assert manager.match_prefix(seq) == prefix
    manager.check([other, seq])
    manager.free(other)
    assert manager.fits(prefix, 12) and not manager.fits(prefix, 13)
    manager.admit(seq, prefix, 11)
    assert len(seq.block_table) == 3 and manager.num_free_blocks == 0
    manager.check([seq])


def test_a_block_is_shared_only_behind_the_same_past():
    manager = BlockManager(16, BLOCK)
    first = compute(manager, make([1, 1, 1, 1, 7, 7, 7, 7, 0]))
    assert manager.match_prefix(make([1, 1, 1, 1, 7, 7, 7, 7, 0])) == first.block_table[:2]
    assert manager.match_prefix(make([2, 1, 1, 1, 7, 7, 7, 7, 0])) == []
    assert manager.match_prefix(make([7, 7, 7, 7, 7, 7, 7, 7, 0])) == []
    for token in (1 + 2**8, 1 + 2**16, 1 + 2**24):  # the whole number is hashed
        assert manager.match_prefix(make([token, 1, 1, 1, 7, 7, 7, 7, 0])) == []


def test_hashes_cannot_be_foretold():
    """Else token ids with the hash of another request's prefix could be constructed, which would then read its
    cache.
    """
    first, second = make(range(9)), make(range(9))
    for seq in (first, second):
        BlockManager(16, BLOCK).match_prefix(seq)
    assert len(first.block_hashes) == 2 and not set(first.block_hashes) & set(second.block_hashes)


def test_prefixes_are_shared_among_sequences_of_the_same_salt():
    manager = BlockManager(32, BLOCK)
    salts = [None, "a", "b", "\ud800"]
    seqs = {salt: compute(manager, make(range(9), salt)) for salt in salts}
    assert len({tuple(seq.block_table) for seq in seqs.values()}) == 4
    for salt, seq in seqs.items():
        assert manager.match_prefix(make(range(9), salt)) == seq.block_table[:2]
    assert manager.match_prefix(make(range(9), "")) == []
    manager.check(seqs.values())


def test_the_last_token_is_always_left_to_compute():
    manager = BlockManager(16, BLOCK)
    first = compute(manager, make(range(8)))
    assert manager.match_prefix(make(range(8))) == first.block_table[:1]
    assert manager.match_prefix(make(range(9))) == first.block_table[:2]


def test_only_computed_and_known_tokens_are_registered():
    manager = BlockManager(16, BLOCK)
    seq = compute(manager, make(range(8)), 7)
    assert manager.match_prefix(make(range(9))) == seq.block_table[:1]
    seq.num_pending = 4  # computed, but the host does not know what they are
    compute(manager, seq, 12)
    assert manager.match_prefix(make(range(12))) == seq.block_table[:2]
    seq.token_ids += [8, 9, 10, 11]
    seq.num_pending = 0
    manager.register(seq, 12)
    assert manager.match_prefix(make(range(13))) == seq.block_table[:3]
    manager.check([seq])


def test_blocks_computed_twice_stay_private():
    manager = BlockManager(16, BLOCK)
    first, second = make(range(8)), make(range(8))
    prefix = manager.match_prefix(first)
    for seq in (first, second):  # before either is registered
        manager.admit(seq, prefix, 8)
    for seq in (first, second):
        manager.register(seq, 8)
    manager.check([first, second])
    assert manager.match_prefix(make(range(9))) == first.block_table
    manager.free(first)
    manager.free(second)
    manager.check([])


def test_freed_blocks_are_revived():
    manager = BlockManager(4, BLOCK)
    blocks = run_and_free(manager, range(9))
    assert manager.num_free_blocks == 4
    again = compute(manager, make(range(9)))
    assert again.block_table[:2] == blocks[:2]
    assert manager.num_free_blocks == 1
    manager.check([again])


def test_a_reused_block_is_forgotten():
    manager = BlockManager(3, BLOCK)
    run_and_free(manager, range(12))
    other = compute(manager, make(range(100, 112)))
    assert manager.match_prefix(make(range(13))) == []
    manager.check([other])


def test_least_recently_used_first():
    manager = BlockManager(6, BLOCK)
    a = run_and_free(manager, range(0, 8))
    b = run_and_free(manager, range(20, 28))
    run_and_free(manager, range(0, 9))  # uses a's again, so that b's are the older ones; and one block of its own
    fresh = compute(manager, make(range(40, 48)))
    assert not set(fresh.block_table) & set(a + b)  # what holds nothing findable goes first
    older = compute(manager, make(range(60, 68)))
    assert older.block_table == b[::-1]  # and a sequence's last blocks before its first
    assert manager.match_prefix(make(range(9))) == a


def test_the_beginning_of_a_prefix_outlives_its_end():
    manager = BlockManager(4, BLOCK)
    blocks = run_and_free(manager, range(16))
    compute(manager, make(range(100, 105)))  # takes two
    assert manager.match_prefix(make(range(17))) == blocks[:2]


def test_a_sequence_that_comes_back_is_registered_again():
    manager = BlockManager(3, BLOCK)
    seq = compute(manager, make(range(9)))
    manager.free(seq)
    manager.free(compute(manager, make(range(100, 112))))
    compute(manager, seq)
    assert manager.match_prefix(make(range(9))) == seq.block_table[:2]


def test_nothing_is_shared_where_prompt_logprobs_are_wanted():
    manager = BlockManager(16, BLOCK)
    first = compute(manager, make(range(9)))
    second = make(range(9), prompt_logprobs=0)
    assert manager.match_prefix(second) == []
    compute(manager, second)
    assert not set(first.block_table) & set(second.block_table)
    manager.check([first, second])


def test_nothing_is_shared_without_prefix_caching():
    manager = BlockManager(16, BLOCK, enable_prefix_caching=False)
    first, second = (compute(manager, make(range(9))) for _ in range(2))
    assert not set(first.block_table) & set(second.block_table)
    manager.check([first, second])


def test_reset_forgets_everything_and_takes_everything_back():
    manager = BlockManager(8, BLOCK)
    run_and_free(manager, range(8))
    for _ in range(2):  # the second one shares a block
        compute(manager, make(range(20, 29)))
    manager.reset()
    manager.check([])
    assert manager.num_free_blocks == 8
    assert manager.match_prefix(make(range(9))) == manager.match_prefix(make(range(20, 29))) == []


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda m, s: s.block_table.append(s.block_table[0]), "holds a block twice"),
        (lambda m, s: m.free(s) or s.block_table.append(0), "block 0: reference count 0, held by 1"),
        (lambda m, s: s.block_table.pop(), "block 2: reference count 1, held by 0"),
        (lambda m, s: s.block_hashes.__setitem__(0, b"other"), "registered for other tokens"),
    ],
)
def test_check_notices(spoil, said):
    manager = BlockManager(8, BLOCK)
    seq = compute(manager, make(range(9)))
    manager.check([seq])
    spoil(manager, seq)
    with pytest.raises(AssertionError, match=said):
        manager.check([seq])


class Model(RuleBasedStateMachine):
    """Random admissions, growth, frees and resets against what the tokens of each block are known to be."""

    @initialize(num_blocks=st.integers(4, 12), caching=st.booleans())
    def start(self, num_blocks, caching):
        self.manager = BlockManager(num_blocks, BLOCK, caching)
        self.live = []
        self.content = {}  # block -> all tokens up to its end, when last written full
        self.rng = random.Random(0)

    @rule(document=st.integers(0, 2), length=st.integers(1, 20), private_end=st.booleans(), part=st.integers(1, 20))
    def admit(self, document, length, private_end, part):
        tokens = [(i * i + document) % 5 for i in range(length)]
        if private_end:
            tokens[-1] = self.rng.randrange(1000, 2000)
        seq = make(tokens)
        prefix = self.manager.match_prefix(seq)
        start = len(prefix) * BLOCK
        assert start < length
        for i, block in enumerate(prefix):
            assert self.content[block] == tokens[: (i + 1) * BLOCK]
        end = min(length, start + part)
        free, missing = self.manager.num_free_blocks, self.manager.blocks_needed(end) - len(prefix)
        revived = len(set(prefix) - {b for s in self.live for b in s.block_table})
        fits = self.manager.fits(prefix, end)
        assert fits == (missing <= free - revived)
        if fits:
            self.manager.admit(seq, prefix, end)
            self.live.append(seq)
            self.write(seq, start, end)

    def write(self, seq, start, end):
        # What is shared is never written.
        for block in seq.block_table[start // BLOCK :]:
            assert sum(block in s.block_table for s in self.live) == 1
        seq.num_computed_tokens = end
        for i in range(start // BLOCK, -(-end // BLOCK)):
            self.content[seq.block_table[i]] = seq.token_ids[: min(end, (i + 1) * BLOCK)]
        self.manager.register(seq, end)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 9))
    def grow(self, which, tokens):
        seq = self.live[which % len(self.live)]
        start = seq.num_computed_tokens
        end = start + tokens
        seq.token_ids += [self.rng.randrange(3) for _ in range(end - len(seq.token_ids))]
        if self.manager.grow(seq, end):
            self.write(seq, start, end)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def free(self, which):
        self.manager.free(self.live.pop(which % len(self.live)))

    @rule()
    def reset(self):
        self.manager.reset()
        self.live.clear()

    @invariant()
    def consistent(self):
        if hasattr(self, "manager"):
            self.manager.check(self.live)
            for seq in self.live:
                for i, block in enumerate(seq.block_table[: seq.num_computed_tokens // BLOCK]):
                    assert self.content[block] == seq.token_ids[: (i + 1) * BLOCK]

    def teardown(self):
        if hasattr(self, "manager"):
            for seq in self.live:
                self.manager.free(seq)
            self.manager.check([])
            assert self.manager.num_free_blocks == self.manager.num_blocks


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
