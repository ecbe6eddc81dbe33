"""The paged KV cache's bookkeeping: which blocks are free, which are shared, and which hold a known prefix.

A *full* block of known tokens is registered under a hash chained over all tokens up to its end, so equal hashes mean
equal prefixes. A registered block stays findable after its last user frees it, until it is handed out again: free
blocks are reused least recently used first, and a sequence's last blocks before its first ones.

The hash is BLAKE2b with a random key for each block manager. Without the key, token ids that have the
hash of another request's prefix cannot be constructed. The first hash of a sequence also depends on its `cache_salt`:
requests with different salts share nothing, and cannot learn from response times what others asked. A block of 256
tokens takes 7.9 us to hash (one core of an AMD EPYC), 5 us of it to pack the ids; unkeyed XXH3-128 took 7.1 us.

A block is registered when the step that computes it is *scheduled*. A request of the same step may then share the
block: in every layer a step stores all its keys and values before any attention reads them. Later steps run after it on
the same stream. There is one exception: a step of single tokens stores and attends in one kernel, so a block that a
single token or a piggybacked prompt completes is registered one step later.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from nanovllm.engine.sequence import Sequence


class BlockManager:
    """Hands out blocks 0 .. num_blocks - 1 of block_size tokens each, with reference counts."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._keyed_hash = hashlib.blake2b(digest_size=16, key=secrets.token_bytes(32))
        self.reset()

    def reset(self) -> None:
        """Free all blocks and forget their contents, even in the middle of another method."""
        self._ref_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # in the order of reuse
        self._hash_of: list[bytes | None] = [None] * self.num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the beginning of the sequence, for `admit`; its last token is never in them."""
        if not self.enable_prefix_caching or seq.params.prompt_logprobs is not None:
            return []  # prompt log-probabilities need the logits of every prompt token
        self._extend_hashes(seq, len(seq.token_ids))
        found = []
        for digest in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, prefix: list[int], num_tokens: int) -> bool:
        """Whether there are blocks for `num_tokens` tokens of a sequence that shares the blocks of `prefix`."""
        revived = sum(self._ref_counts[block] == 0 for block in prefix)  # they are free, too, and cannot be used twice
        return self.blocks_needed(num_tokens) - len(prefix) <= len(self._free) - revived

    def admit(self, seq: Sequence, prefix: list[int], num_tokens: int) -> None:
        """Give a waiting sequence `prefix` (from `match_prefix`) and new blocks, for `num_tokens` tokens that fit."""
        assert not seq.block_table
        for block in prefix:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        seq.block_table = list(prefix)
        grown = self.grow(seq, num_tokens)
        assert grown, "the blocks do not fit"

    def grow(self, seq: Sequence, num_tokens: int, keep_free: int = 0) -> bool:
        """Extend the sequence's blocks to hold `num_tokens`.

        Returns False, with nothing changed, if fewer than `keep_free` blocks would stay free afterwards.
        """
        missing = self.blocks_needed(num_tokens) - len(seq.block_table)
        if missing > len(self._free) - keep_free:
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            seq.block_table.append(block)
        return True

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks of the sequence's first `num_tokens` tokens findable, as far as the host knows them."""
        if not self.enable_prefix_caching:
            return
        full = min(num_tokens, len(seq.token_ids)) // self.block_size
        if full == seq.num_registered_blocks:
            return
        self._extend_hashes(seq, full * self.block_size)
        for i in range(seq.num_registered_blocks, full):
            block, digest = seq.block_table[i], seq.block_hashes[i]
            # If another block holds the same tokens already, this one stays private.
            if self._hash_of[block] is None and digest not in self._block_of:
                self._hash_of[block] = digest
                self._block_of[digest] = block
        seq.num_registered_blocks = full

    def free(self, seq: Sequence) -> None:
        """Take back the sequence's references. Its registered blocks stay findable until they are reused."""
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)  # not findable: reuse it first
        seq.block_table = []
        seq.num_registered_blocks = 0

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._hash_of[block] = None

    def _extend_hashes(self, seq: Sequence, num_tokens: int) -> None:
        hashes = seq.block_hashes
        for i in range(len(hashes), num_tokens // self.block_size):
            digest = self._keyed_hash.copy()
            digest.update(hashes[-1] if hashes else self._first_parent(seq))
            digest.update(array("i", seq.token_ids[i * self.block_size : (i + 1) * self.block_size]))
            hashes.append(digest.digest())

    def _first_parent(self, seq: Sequence) -> bytes:
        """The hash that the first block's hash is chained to."""
        digest = self._keyed_hash.copy()
        if seq.cache_salt is not None:
            # The prefix byte keeps the empty salt apart from none.
            digest.update(b"s" + seq.cache_salt.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants, given every sequence that may hold blocks."""
        held: dict[int, int] = {}
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} holds a block twice: {seq.block_table}"
            for i, block in enumerate(seq.block_table):
                held[block] = held.get(block, 0) + 1
                digest = self._hash_of[block]
                assert digest is None or seq.block_hashes[i] == digest, (
                    f"block {block} of {seq} is registered for other tokens"
                )
        for block in range(self.num_blocks):
            count = self._ref_counts[block]
            assert count == held.get(block, 0), f"block {block}: reference count {count}, held by {held.get(block, 0)}"
            assert (block in self._free) == (count == 0), (
                f"block {block}: reference count {count}, free: {block in self._free}"
            )
            assert count <= 1 or self._hash_of[block] is not None, f"block {block} is shared but not registered"
        assert len(self._free) + len(held) == self.num_blocks
        for digest, block in self._block_of.items():
            assert self._hash_of[block] == digest, f"block {block} is found under a hash that is not its own"
        assert len(self._block_of) == sum(h is not None for h in self._hash_of)
