"""What attention needs of the paged KV cache, as one record."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class PagedKV:
    """One layer's keys and values in blocks, and which of them each sequence has.

    Token t of sequence i lies in block `block_table[i, t // block_size]` at offset `t % block_size`. Query head h reads
    KV head h // (num_heads / num_kv_heads). A cache may have another dtype than the queries, float8_e4m3fn among them.
    """

    k_cache: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]: float8_e4m3fn or any floating dtype of 16 bits or more."""
    v_cache: torch.Tensor
    """The shape, dtype and strides of k_cache."""
    block_table: torch.Tensor
    """[num_seqs, max_blocks] int32, columns adjacent. Entries past a sequence's last block may be any valid block."""
    context_lens: torch.Tensor
    """[num_seqs] int32, contiguous: all tokens of each sequence up to its last query."""
    max_context_len: int
    """A bound on context_lens that the host knows. Work is sized by it, so that a CUDA graph can be captured."""
    k_scale: torch.Tensor | None = None
    """float32 [1] or [num_kv_heads], contiguous: a key is the cached value times k_scale. None: 1."""
    v_scale: torch.Tensor | None = None
    """The same of values."""

    @property
    def num_seqs(self) -> int:
        """Sequences, some of which may be padding, with a length of 0."""
        return self.context_lens.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return self.k_cache.shape[2]

    @property
    def longest(self) -> int:
        """A bound on the tokens of a sequence: max_context_len, and what the columns of block_table can hold."""
        return min(self.max_context_len, self.block_table.shape[1] * self.block_size)

    def rows(self, rows: slice) -> "PagedKV":
        """The same cache for some of the sequences."""
        return replace(self, block_table=self.block_table[rows], context_lens=self.context_lens[rows])


@dataclass(frozen=True)
class NewTokens:
    """One new token a sequence, its last one, as the QKV projection gives it, with what its head norms and rotation
    need.
    """

    k: torch.Tensor
    """[num_seqs, num_kv_heads, head_dim]"""
    v: torch.Tensor
    """[num_seqs, num_kv_heads, head_dim]"""
    cos_sin_cache: torch.Tensor
    """[max_position, head_dim] float32, as in `rotary_embedding`."""
    q_weight: torch.Tensor | None = None
    """[head_dim], the dtype of q: of the norm of each query head. None: no norm. Both weights are given or neither."""
    k_weight: torch.Tensor | None = None
    """[head_dim], the dtype of k: of the norm of each key head."""
    eps: float = 0.0
    """The eps of the norms of q and k."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which sequences of a decode batch have the same leading blocks."""

    groups: torch.Tensor
    """[num_groups, 3] int32, contiguous. With (first, count, tokens) = groups[g], the sequences of group g are
    group_rows[first : first + count], and they have the same blocks in their first `tokens` tokens. `tokens` is a
    multiple of block_size, and less than the length of any of them. A group without tokens or without sequences is
    padding."""
    group_rows: torch.Tensor
    """[num_seqs] int32, contiguous: the sequences of all groups, none twice. Entries of no group may be anything."""
    shared_lens: torch.Tensor
    """[num_seqs] int32, contiguous: the `tokens` of each sequence's group, 0 without one."""
