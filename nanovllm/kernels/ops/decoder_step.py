"""All layers of a decoder, as one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.norm import rms_norm
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.ops.rotary import rotary_embedding
from nanovllm.kernels.ops.store_kvcache import store_kvcache


class Matrix(Protocol):
    """A weight [rows, columns], stored in any form."""

    rows: int
    columns: int

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [count, columns] float32 -> x W^T [count, rows] float32."""


@dataclass(frozen=True)
class DecoderLayerWeights:
    """One layer's weights. Vectors are float32 and contiguous; None: the model has none."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    window: int | None = None
    """A token attends to the last `window` tokens up to itself; None: to all of them."""
    rotated: bool = True
    """Whether queries and keys are rotated."""


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """The weights of a pre-norm decoder with one rotary table, embedding and LM head apart."""

    layers: Sequence[DecoderLayerWeights]
    final_norm: torch.Tensor
    """[hidden] float32"""
    cos_sin_cache: torch.Tensor
    """[max_position, head_dim] float32, as in `rotary_embedding`."""
    eps: float
    """The eps of every norm."""

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.cos_sin_cache.shape[1]


@dataclass(frozen=True)
class DecoderBatch:
    """The tokens of a step: `num_decodes` sequences with one token each, then the runs of the others."""

    positions: torch.Tensor
    """[num_tokens] int64"""
    slot_mapping: torch.Tensor
    """[num_tokens] int64: the cache slot of each token."""
    block_table: torch.Tensor
    """[num_seqs, max_blocks] int32, as in `PagedKV`."""
    context_lens: torch.Tensor
    """[num_seqs] int32: tokens of each sequence up to its last one of this batch."""
    num_decodes: int
    cu_seqlens_q: torch.Tensor | None = None
    """[num_seqs - num_decodes + 1] int32: where each run begins, from the first run's start. None: there are none."""


@op(
    fuses=(
        "embedding", "add_rms_norm", "rms_norm", "linear", "add_rms_norm_linear", "add_rms_norm_gate_up",
        "linear_add_rms_norm", "linear_silu_and_mul", "silu_and_mul", "rotary_embedding", "qk_norm_rope",
        "qk_norm_rope_store", "qk_norm_rope_attention", "qk_norm_rope_attention_shared", "store_kvcache",
        "attention_decode", "attention_decode_shared", "attention_prefill",
    ),
    exported=False,
)  # fmt: skip
def decoder_step(
    x: torch.Tensor,
    batch: DecoderBatch,
    weights: DecoderWeights,
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a decoder's layers and its final norm; store the new keys and values.

    Args:
        x: [num_tokens, hidden] float32, the embeddings. A provider may overwrite them.
        k_caches, v_caches: one for each layer to run, [num_blocks, block_size, num_kv_heads, head_dim].
        rows: [num_rows] int64: the tokens whose hidden states are wanted. None: all.

    Returns:
        [num_rows, hidden] float32.
    """
    dim, b = weights.head_dim, batch
    for layer, k_cache, v_cache in zip(weights.layers, k_caches, v_caches):
        normed = rms_norm.native(x, layer.input_norm, weights.eps)
        q, k, v = (
            _plus(matrix.product(normed), bias).unflatten(-1, (-1, dim))
            for matrix, bias in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
        )
        q = q if layer.q_norm is None else rms_norm.native(q, layer.q_norm, weights.eps)
        k = k if layer.k_norm is None else rms_norm.native(k, layer.k_norm, weights.eps)
        if layer.rotated:
            q, k = rotary_embedding.native(b.positions, q, k, weights.cos_sin_cache)
        store_kvcache.native(k, v, k_cache, v_cache, b.slot_mapping)
        x = x + _plus(layer.o.product(_attend(q, k_cache, v_cache, b, layer.window).flatten(1)), layer.o_bias)
        normed = rms_norm.native(x, layer.post_norm, weights.eps)
        gate, up = _plus(layer.gate.product(normed), layer.gate_bias), _plus(layer.up.product(normed), layer.up_bias)
        x = x + _plus(layer.down.product(silu_and_mul.native(torch.cat((gate, up), -1))), layer.down_bias)
    x = x if rows is None else x[rows]
    return rms_norm.native(x, weights.final_norm, weights.eps)


def _plus(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, b: DecoderBatch, window: int | None
) -> torch.Tensor:
    longest = int(b.context_lens.max()) if len(b.context_lens) else 0
    kv = PagedKV(k_cache, v_cache, b.block_table, b.context_lens, longest)
    n, scale = b.num_decodes, q.shape[-1] ** -0.5
    parts = [attention_decode.native(q[:n], kv.rows(slice(n)), scale, window)] if n else []
    if b.cu_seqlens_q is not None:
        longest_run = int(b.cu_seqlens_q.diff().max())
        parts.append(
            attention_prefill.native(q[n:], kv.rows(slice(n, None)), b.cu_seqlens_q, longest_run, scale, window)
        )
    return torch.cat(parts)
