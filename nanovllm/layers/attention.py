"""Attention over the paged KV cache, and the record that says what a batch attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nanovllm.kernels import Kernels, NewTokens, PagedKV, SharedPrefixes
from nanovllm.layers.selected_op import FusedOp, SelectedOp
from nanovllm.layers.side_stream import side_stream

if TYPE_CHECKING:
    from nanovllm.layers.layernorm import RMSNorm
    from nanovllm.layers.rotary_embedding import RotaryEmbedding


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
    concurrent: bool = False
    """Whether other kernels run at the same time as the attention of the runs."""
    shared: SharedPrefixes | None = None
    """In a batch of decodes alone: the groups of sequences that share leading blocks, which are read once."""
    piggybacked: AttentionMetadata | None = None
    """Runs of prompt tokens that are computed together with a batch of decodes: their tokens follow those of the
    decodes, and every other field describes the decodes only. The attention of the two kinds runs concurrently, each
    with its own ops. So no decode may attend to what a piggybacked run writes, nor the other way round."""

    def paged(self, cache: LayerCache) -> PagedKV:
        """What a layer's attention needs of its cache."""
        lens, bound = self.context_lens, self.max_context_len
        return PagedKV(cache.k, cache.v, self.block_table, lens, bound, cache.k_scale, cache.v_scale)


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
        self._attention_decode = SelectedOp("attention_decode", kernels)
        self._attention_prefill = SelectedOp("attention_prefill", kernels)
        self._qk_norm_rope_store = FusedOp("qk_norm_rope_store", kernels)
        self._qk_norm_rope_attention = FusedOp("qk_norm_rope_attention", kernels)
        self._attention_decode_shared = FusedOp("attention_decode_shared", kernels)
        self._qk_norm_rope_attention_shared = FusedOp("qk_norm_rope_attention_shared", kernels)

    def after_projection(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryEmbedding,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        cache: LayerCache,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of q, k and v as the QKV projection gives them: they are normalised and rotated first.

        One op does several of these steps where such a provider was selected.

        Args:
            positions: [num_tokens] int64.
            out: takes the result, contiguous, of the shape of q; None: a new tensor.

        Raises:
            ValueError: a token lacks a position, key or value, or the heads or dtypes differ.
        """
        m = metadata
        _check_projection(positions, q, k, v, rotary)
        if m.piggybacked is not None:
            n = m.num_decodes
            rest = (rotary, q_norm, k_norm, cache)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            with side_stream(q.device) as side:
                with torch.cuda.stream(side):
                    self.after_projection(positions[n:], q[n:], k[n:], v[n:], *rest, m.piggybacked, out[n:])
                self.after_projection(positions[:n], q[:n], k[:n], v[:n], *rest, replace(m, piggybacked=None), out[:n])
            return out
        norms = () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        new, kv = NewTokens(k, v, rotary.cos_sin_cache, *norms), m.paged(cache)
        options = self.scale, self.window, self.soft_cap
        if self._qk_norm_rope_attention_shared.used and m.shared is not None:
            return self._qk_norm_rope_attention_shared(q, new, kv, m.shared, *options, out=out)
        if self._qk_norm_rope_attention.used and m.cu_seqlens_q is None and m.shared is None:
            return self._qk_norm_rope_attention(q, new, kv, *options, out=out)
        if self._qk_norm_rope_store.used:
            q = self._qk_norm_rope_store(
                positions, q, k, v, rotary.cos_sin_cache, cache.k, cache.v, m.slot_mapping, *norms,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
            )  # fmt: skip
            return self.attend(q, cache, m, out)
        q, k = rotary(positions, q, k, q_norm, k_norm)
        return self(q, k, v, cache, m, out)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store k and v, then attend.

        Args:
            q: [num_tokens, num_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim].
            out: takes the result; None: a new tensor of the shape of q.
        """
        self._store_kvcache(k, v, cache.k, cache.v, metadata.slot_mapping, cache.k_scale, cache.v_scale)
        return self.attend(q, cache, metadata, out)

    def attend(
        self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As a call, where the keys and values of the batch are in the cache already."""
        m, n, kv = metadata, metadata.num_decodes, metadata.paged(cache)
        options = self.scale, self.window, self.soft_cap
        if self._attention_decode_shared.used and m.shared is not None:
            return self._attention_decode_shared(q, kv, m.shared, *options, out=out)
        if m.cu_seqlens_q is None:
            return self._attention_decode(q, kv, *options, out=out)
        if n:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
            self._attention_decode(q[:n], kv.rows(slice(n)), *options, out=out[:n])
        # The host does not know the lengths of the runs' contexts: the block table's width bounds them.
        runs = replace(kv.rows(slice(n, None)), max_context_len=kv.block_table.shape[1] * kv.block_size)
        result = self._attention_prefill(
            q[n:], runs, m.cu_seqlens_q, m.max_query_len, *options, out=None if out is None else out[n:],
            concurrent=m.concurrent,
        )  # fmt: skip
        return result if out is None else out


def _check_projection(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: RotaryEmbedding
) -> None:
    tokens, _, head_dim = q.shape
    expected = (tokens, k.shape[1], head_dim)
    same_dtype = q.dtype == k.dtype == v.dtype
    if positions.shape != (tokens,) or k.shape != expected or v.shape != expected or not same_dtype:
        tensors = {"positions": positions, "q": q, "k": k, "v": v}
        given = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in tensors.items())
        expected_all = "a position, key and value for each query, of one head_dim and dtype"
        raise ValueError(f"positions, q, k, v: expected {expected_all}, not {given}")
    if (of_angles := rotary.cos_sin_cache.shape[1]) != head_dim:
        raise ValueError(f"q: expected a head_dim of {of_angles}, as the angles have, not {head_dim}")
