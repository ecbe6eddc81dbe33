"""All that lies between the QKV projection and the output projection of a decode step."""

from dataclasses import replace

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.attention import attention_decode
from nanovllm.kernels.ops.attention_inputs import DECODE, NEW_TOKENS, like_queries, projected_inputs, with_new_tokens
from nanovllm.kernels.ops.checks import check_attention_values, check_decode, values_checked
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV
from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store


def _inputs(t, num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size):
    shape = num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size
    return projected_inputs(t, DECODE["inputs"].make(t, *shape))


def _cost(
    q, k, v, cos_sin_cache, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window=None, **_
):  # fmt: skip
    decode = DECODE["cost"](q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window)
    return with_new_tokens(decode, q, k, v)


@op(
    arguments={**DECODE["arguments"], **NEW_TOKENS},
    inputs=replace(
        DECODE["inputs"],
        make=_inputs,
        variants=[{}, {"q_weight": None, "k_weight": None}, {"window": 20}, {"soft_cap": 5.0}],
        scales=(1.0, 2.0),  # scores grow with the square, and so does what rounding q and k does to them
    ),
    cost=_cost,
    tolerance=DECODE["tolerance"],
    mutates=("k_cache", "v_cache"),
    fuses=("qk_norm_rope", "rotary_embedding", "qk_norm_rope_store", "store_kvcache", "attention_decode"),
    fake=like_queries,
)
def qk_norm_rope_attention(
    q: torch.Tensor,
    new: NewTokens,
    kv: PagedKV,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """`qk_norm_rope_store` of one new token a sequence, its last one, and then `attention_decode`.

    Args:
        q: [num_seqs, num_heads, head_dim], any float dtype, as the QKV projection gives it.
        new: the new tokens. What is stored is k / k_scale and v / v_scale.
        kv: as in `attention_decode`. Lengths count the new token, so that every length is at least 1. The new token of
            sequence i stands at position context_lens[i] - 1, and is written in place, to the block that block_table
            says.
        scale, window, soft_cap: as in `attention_decode`.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q. Everything is rounded wherever the separate ops round.

    Raises:
        ValueError: as `attention_decode`; also for a length of 0, or beyond the rows of cos_sin_cache.
    """
    check_decode(q, kv, scale, window, soft_cap, new)
    if values_checked(q.device):
        check_attention_values(kv, least=1, positions=new.cos_sin_cache.shape[0])
    positions = kv.context_lens.long() - 1
    blocks = kv.block_table.gather(1, (positions // kv.block_size)[:, None])[:, 0].long()
    slots = blocks * kv.block_size + positions % kv.block_size
    q = qk_norm_rope_store.native(
        positions, q, new.k, new.v, new.cos_sin_cache, kv.k_cache, kv.v_cache, slots, new.q_weight, new.k_weight,
        new.eps,
        kv.k_scale, kv.v_scale,
    )  # fmt: skip
    return attention_decode.native(q, kv, scale, window, soft_cap)
