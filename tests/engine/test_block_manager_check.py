"""`BlockManager.check` and `reset`, after mistakes of callers and interrupts in the middle of a method."""

import pytest

from nanovllm.engine.block_manager import BlockManager
from tests.engine.test_block_manager import BLOCK, compute, make, run_and_free


class InterruptedTable(list):
    """A block table that a KeyboardInterrupt keeps from growing."""

    def append(self, block):
        raise KeyboardInterrupt


class InterruptedKey:
    """Hashing it for the last of `times` times is interrupted."""

    def __init__(self, value, times):
        self.times = times

    def __new__(cls, value, times):
        return super().__new__(cls, value)

    def __hash__(self):
        self.times -= 1
        if self.times == 0:
            raise KeyboardInterrupt
        return super().__hash__()


class InterruptedBlock(InterruptedKey, int):
    pass


class InterruptedDigest(InterruptedKey, bytes):
    pass


def grow_interrupted(manager):
    """A block has left the free ones, and no sequence has it yet."""
    seq = make(range(50, 59))
    seq.block_table = InterruptedTable()
    with pytest.raises(KeyboardInterrupt):
        manager.grow(seq, 9)


def free_interrupted(manager, seq):
    """The sequence's last block has lost its only user, and is not free yet."""
    last = InterruptedBlock(seq.block_table.pop(), times=1)
    seq.block_table.append(last)
    with pytest.raises(KeyboardInterrupt):
        manager.free(seq)
    seq.block_table.pop()


def register_interrupted(manager, seq):
    """A block has its hash, by which it is not found yet."""
    seq.token_ids += range(9, 12)
    seq.num_computed_tokens = 12
    manager.match_prefix(seq)  # hashes the new block
    seq.block_hashes[2] = InterruptedDigest(seq.block_hashes[2], times=2)
    with pytest.raises(KeyboardInterrupt):
        manager.register(seq)


def test_reset_forgets_everything_and_takes_everything_back():
    manager = BlockManager(8, BLOCK)
    run_and_free(manager, range(8))
    compute(manager, make(range(20, 29)))
    compute(manager, make(range(20, 29)))  # shares a block
    grow_interrupted(manager)
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
        (lambda m, s: grow_interrupted(m), "block 3: reference count 1, held by 0"),
        (lambda m, s: free_interrupted(m, s), "block 2: reference count 0, free: False"),
        (lambda m, s: register_interrupted(m, s), None),
    ],
)
def test_check_notices(spoil, said):
    manager = BlockManager(8, BLOCK)
    seq = compute(manager, make(range(9)))
    manager.check([seq])
    spoil(manager, seq)
    with pytest.raises(AssertionError, match=said):
        manager.check([seq])
