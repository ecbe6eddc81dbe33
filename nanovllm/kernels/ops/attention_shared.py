"""Decode attention of sequences that share leading blocks, alone and with all that comes before it.

The references ignore who shares what: attending to the same blocks once or several times gives the same result.
"""

import torch

from nanovllm.kernels.op.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.attention import attention_decode
from nanovllm.kernels.ops.attention_inputs import DECODE, lengths_and_heads
from nanovllm.kernels.ops.checks import check_decode, values_checked
from nanovllm.kernels.ops.qk_norm_rope_attention import qk_norm_rope_attention
from nanovllm.kernels.ops.shared_prefixes import (
    SHARED_ARGUMENTS,
    check_shared,
    check_shared_values,
    shared_cost,
    shared_inputs,
)

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


def _fake(q, *args, **kwargs):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@op(
    arguments={**DECODE["arguments"], **SHARED_ARGUMENTS},
    inputs=Inputs(
        shared_inputs,
        small=_SMALL,
        decode=_DECODE,
        large=_LARGE,
        needs=lengths_and_heads,
        variants=[{}, {"window": 20}, {"soft_cap": 5.0}],
        scales=(1.0, 30.0),
    ),
    cost=shared_cost,
    tolerance=DECODE["tolerance"],
    fuses=("attention_decode",),
    fake=_fake,
)
def attention_decode_shared(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    groups: torch.Tensor,
    group_rows: torch.Tensor,
    shared_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention_decode`, told which sequences have the same leading blocks, so that a provider can read these once.

    Args:
        groups: [num_groups, 3] int32, contiguous. The sequences of group g are `count` entries of group_rows from `first` on, and have the
            same blocks in their first `tokens` tokens, where (first, count, tokens) = groups[g]. `tokens` is a multiple of
            block_size and less than the length of any of them; a group may have no tokens or no sequences, and then is none.
        group_rows: [num_seqs] int32, contiguous: the sequences of all groups, none twice; entries of no group may be anything.
        shared_lens: [num_seqs] int32, contiguous: the `tokens` of the sequence's group, 0 without one.
        The others are those of `attention_decode`. With a window nothing need be shared.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q.
    """
    check_decode(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale)
    check_shared(context_lens, groups, group_rows, shared_lens)
    if values_checked(q.device):
        check_shared_values(k_cache, block_table, context_lens, max_context_len, groups, group_rows, shared_lens)
    return attention_decode.native(
        q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window, soft_cap, k_scale, v_scale
    )


def _projected_inputs(
    t, num_seqs, num_groups, shared, least, most, num_heads, num_kv_heads, head_dim, block_size
):  # fmt: skip
    given = shared_inputs(t, num_seqs, num_groups, shared, least, most, num_heads, num_kv_heads, head_dim, block_size)
    positions = torch.arange(given["max_context_len"] + 1)
    angles = torch.outer(positions, 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    k, v = (t.normal(num_seqs, num_kv_heads, head_dim) for _ in range(2))
    return {
        "q": given.pop("q"),
        "k": k,
        "v": v,
        "cos_sin_cache": t.spread(torch.cat((angles.cos(), angles.sin()), -1).to(t.device, torch.float32)),
        **given,
        "q_weight": t.parameter(head_dim, scale=1),
        "k_weight": t.parameter(head_dim, scale=1),
        "eps": 1e-6,
    }


def _projected_cost(
    q, k, v, cos_sin_cache, k_cache, v_cache, block_table, context_lens, groups, group_rows, shared_lens, max_context_len,
    scale, *_, **options,
) -> Cost:  # fmt: skip
    cost = shared_cost(
        q, k_cache, v_cache, block_table, context_lens, groups, group_rows, shared_lens, max_context_len, scale,
        options.get("window"),
    )  # fmt: skip
    return Cost(cost.bytes + nbytes(k, v), cost.flops + 7 * (q.numel() + k.numel()))


@op(
    arguments={**qk_norm_rope_attention.check.patterns, **SHARED_ARGUMENTS},
    inputs=Inputs(
        _projected_inputs,
        small=_SMALL,
        decode=_DECODE,
        large=_LARGE,
        needs=lengths_and_heads,
        variants=[{}, {"q_weight": None, "k_weight": None}, {"window": 20}, {"soft_cap": 5.0}],
        # No large ones: without a norm, roundings of q and k show in the scores, in proportion to both.
        scales=(1.0, 1e-3),
    ),
    cost=_projected_cost,
    tolerance=DECODE["tolerance"],
    mutates=("k_cache", "v_cache"),
    fuses=(*qk_norm_rope_attention.fuses, "qk_norm_rope_attention", "attention_decode_shared"),
    fake=_fake,
)
def qk_norm_rope_attention_shared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    groups: torch.Tensor,
    group_rows: torch.Tensor,
    shared_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`qk_norm_rope_attention`, told which sequences have the same leading blocks, so that a provider can read these once.

    Args:
        groups, group_rows, shared_lens: as in `attention_decode_shared`. The new tokens are not among the shared ones.
        The others are those of `qk_norm_rope_attention`.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q.
    """
    check_decode(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale)
    check_shared(context_lens, groups, group_rows, shared_lens)
    if values_checked(q.device):
        check_shared_values(
            k_cache, block_table, context_lens, max_context_len, groups, group_rows, shared_lens, cos_sin_cache.shape[0]
        )
    return qk_norm_rope_attention.native(
        q, k, v, cos_sin_cache, k_cache, v_cache, block_table, context_lens, max_context_len, scale, q_weight, k_weight, eps,
        window, soft_cap, k_scale, v_scale,
    )  # fmt: skip
