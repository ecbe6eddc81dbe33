"""Decode attention of sequences that share leading blocks, alone and with all that comes before it.

The references ignore which sequences share what: attending to the same blocks once or several times gives the same
result.
"""

from dataclasses import replace

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost
from nanovllm.kernels.ops.attention import attention_decode
from nanovllm.kernels.ops.attention_inputs import DECODE, like_queries, projected_inputs, with_new_tokens
from nanovllm.kernels.ops.checks import check_decode
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV, SharedPrefixes
from nanovllm.kernels.ops.qk_norm_rope_attention import qk_norm_rope_attention
from nanovllm.kernels.ops.shared_prefixes import SHARED_ARGUMENTS, check_shared, shared_cost, shared_inputs

# num_seqs, num_groups, blocks shared, least, most, num_heads, num_kv_heads, head_dim, block_size
_SMALL = [
    (2, 1, 1, 1, 1, 1, 1, 64, 16),
    (7, 2, 3, 1, 40, 4, 2, 64, 16),
    (9, 3, 2, 5, 40, 9, 3, 80, 32),
    (5, 0, 1, 3, 20, 4, 2, 64, 16),
    (4, 4, 1, 1, 9, 7, 1, 96, 16),
    (0, 2, 1, 1, 1, 4, 2, 64, 16),
]
# Qwen3-0.6B's heads, then Qwen3-8B's.
_DECODE = [
    (32, 1, 4, 64, 192, 16, 8, 128, 256),
    (64, 8, 4, 64, 192, 32, 8, 128, 256),
]
_LARGE = [
    (256, 1, 4, 64, 192, 16, 8, 128, 256),
    (256, 32, 8, 64, 512, 16, 8, 128, 256),
    (256, 1, 8, 64, 512, 32, 8, 128, 256),
]


_INPUTS = replace(
    DECODE["inputs"],
    make=shared_inputs,
    small=_SMALL,
    decode=_DECODE,
    large=_LARGE,
    variants=[{}, {"window": 20}, {"soft_cap": 5.0}],
    scales=(1.0, 30.0),
)


@op(
    arguments={**DECODE["arguments"], **SHARED_ARGUMENTS},
    inputs=_INPUTS,
    cost=shared_cost,
    tolerance=DECODE["tolerance"],
    fuses=("attention_decode",),
    fake=like_queries,
)
def attention_decode_shared(
    q: torch.Tensor,
    kv: PagedKV,
    shared: SharedPrefixes,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """`attention_decode` of one query token a sequence; `shared` says which sequences have the same leading blocks.

    A provider can read these blocks once. With a window nothing need be shared.

    Args:
        shared: which sequences share how many blocks.
        The others are those of `attention_decode`.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q.

    Raises:
        ValueError: as `attention_decode`, or the groups do not fit the lengths.
    """
    check_decode(q, kv, scale, window, soft_cap)
    check_shared(kv, shared)
    return attention_decode.native(q, kv, scale, window, soft_cap)


def _projected_inputs(
    t, num_seqs, num_groups, shared, least, most, num_heads, num_kv_heads, head_dim, block_size
):  # fmt: skip
    shape = num_seqs, num_groups, shared, least, most, num_heads, num_kv_heads, head_dim, block_size
    return projected_inputs(t, shared_inputs(t, *shape))


def _projected_cost(q, k, v, cos_sin_cache, *attended, **options) -> Cost:
    return with_new_tokens(shared_cost(q, *attended, **options), q, k, v)


@op(
    arguments={**qk_norm_rope_attention.check.patterns, **SHARED_ARGUMENTS},
    inputs=replace(
        _INPUTS,
        make=_projected_inputs,
        variants=[{}, {"q_weight": None, "k_weight": None}, {"window": 20}, {"soft_cap": 5.0}],
        # No large ones: without a norm, roundings of q and k show in the scores, in proportion to both.
        scales=(1.0, 1e-3),
    ),
    cost=_projected_cost,
    tolerance=DECODE["tolerance"],
    mutates=("k_cache", "v_cache"),
    fuses=(*qk_norm_rope_attention.fuses, "qk_norm_rope_attention", "attention_decode_shared"),
    fake=like_queries,
)
def qk_norm_rope_attention_shared(
    q: torch.Tensor,
    new: NewTokens,
    kv: PagedKV,
    shared: SharedPrefixes,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """`qk_norm_rope_attention`, where `shared` says which sequences have the same leading blocks.

    The new tokens are not among the shared ones.

    Args:
        shared: which sequences share how many blocks.
        The others are those of `qk_norm_rope_attention`.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q.

    Raises:
        ValueError: as `qk_norm_rope_attention`, or the groups do not fit the lengths.
    """
    check_decode(q, kv, scale, window, soft_cap, new)
    check_shared(kv, shared, new.cos_sin_cache.shape[0])
    return qk_norm_rope_attention.native(q, new, kv, scale, window, soft_cap)
