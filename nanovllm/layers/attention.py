"""Attention over the paged KV cache, and the record that says what a batch attends to."""

from dataclasses import dataclass

import torch

from nanovllm.kernels import Kernels


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a batch's tokens go in the KV cache, and what each attends to.

    A batch is laid out as `num_decodes` sequences with one query token each, then the runs of tokens of the others.
    Rows of `block_table` are in the same order. Host values are Python integers; tensors are on the model's device.
    """

    num_decodes: int
    slot_mapping: torch.Tensor
    """[num_tokens] int64: the cache slot of each token."""
    block_table: torch.Tensor
    """[num_seqs, max_blocks] int32."""
    context_lens: torch.Tensor
    """[num_seqs] int32: tokens of each sequence up to its last one of this batch, which it attends to."""
    max_context_len: int
    """A bound on the decodes' context_lens."""
    cu_seqlens_q: torch.Tensor | None = None
    """[num_seqs - num_decodes + 1] int32: where each run of tokens starts, counted from the first run's start."""
    max_query_len: int = 0
    """The longest run."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: [num_blocks, block_size, num_kv_heads, head_dim] each.

    A key is the cached value times `k_scale`, float32 [1] or [num_kv_heads]; None stands for 1. float8 caches use them.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class Attention:
    """Stores new keys and values, then attends. Holds no parameters and no cache: both come as arguments.

    Args:
        scale: multiplies q @ k.
        window: if given, a token attends to the last `window` tokens up to itself.
        soft_cap: if given, scores s become soft_cap * tanh(s / soft_cap).
    """

    def __init__(
        self, scale: float, kernels: Kernels, window: int | None = None, soft_cap: float | None = None
    ) -> None:
        self.scale = scale
        self.window = window
        self.soft_cap = soft_cap
        self._store_kvcache = kernels.store_kvcache
        self._attention_decode = kernels.attention_decode
        self._attention_prefill = kernels.attention_prefill

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim] -> the shape of q."""
        self._store_kvcache(k, v, cache.k, cache.v, metadata.slot_mapping, cache.k_scale, cache.v_scale)
        return self.attend(q, cache, metadata)

    def attend(self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata) -> torch.Tensor:
        """As a call, where the keys and values of the batch are in the cache already."""
        m = metadata
        options = (self.scale, self.window, self.soft_cap, cache.k_scale, cache.v_scale)
        num_decodes = m.num_decodes
        parts = []
        if num_decodes:
            parts.append(
                self._attention_decode(
                    q[:num_decodes],
                    cache.k,
                    cache.v,
                    m.block_table[:num_decodes],
                    m.context_lens[:num_decodes],
                    m.max_context_len,
                    *options,
                )
            )
        if m.cu_seqlens_q is not None:
            parts.append(
                self._attention_prefill(
                    q[num_decodes:],
                    cache.k,
                    cache.v,
                    m.block_table[num_decodes:],
                    m.cu_seqlens_q,
                    m.context_lens[num_decodes:],
                    m.max_query_len,
                    *options,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
