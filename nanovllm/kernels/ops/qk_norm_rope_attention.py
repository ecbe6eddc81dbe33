"""All that lies between the QKV projection and the output projection of a decode step."""

import torch

from nanovllm.kernels.op.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.ops.attention import attention_decode
from nanovllm.kernels.ops.attention_inputs import DECODE, lengths_and_heads
from nanovllm.kernels.ops.checks import check_attention_values, check_decode, check_new_tokens, values_checked
from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store


def _inputs(t, num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size):
    given = DECODE["inputs"].make(t, num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size)
    k, v = (t.normal(num_seqs, num_kv_heads, head_dim) for _ in range(2))
    angles = torch.outer(torch.arange(most + 1), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
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


def _cost(q, k, v, cos_sin_cache, k_cache, v_cache, block_table, context_lens, max_context_len, scale, *_, **options):
    window = options.get("window")
    cost = DECODE["cost"](q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window)
    # The new keys and values are among what `cost` reads; here they come from the projection, and go to the cache.
    return Cost(cost.bytes + nbytes(k, v), cost.flops + 7 * (q.numel() + k.numel()))


@op(
    arguments={
        **DECODE["arguments"],
        "k": "[num_seqs, num_kv_heads, head_dim]",
        "v": "[num_seqs, num_kv_heads, head_dim]",
        "cos_sin_cache": "float32[max_position, head_dim]",
        "q_weight": "[head_dim]",
        "k_weight": "[head_dim]",
    },
    inputs=Inputs(
        _inputs,
        small=DECODE["inputs"].small,
        decode=DECODE["inputs"].decode,
        large=DECODE["inputs"].large,
        needs=lengths_and_heads,
        variants=[{}, {"q_weight": None, "k_weight": None}, {"window": 20}, {"soft_cap": 5.0}],
        scales=(1.0, 2.0),  # scores grow with the square, and so does what rounding q and k does to them
    ),
    cost=_cost,
    tolerance=DECODE["tolerance"],
    mutates=("k_cache", "v_cache"),
    fuses=("qk_norm_rope", "rotary_embedding", "qk_norm_rope_store", "store_kvcache", "attention_decode"),
    fake=lambda q, *args, **kwargs: torch.empty_like(q, memory_format=torch.contiguous_format),
)
def qk_norm_rope_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
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
    """`qk_norm_rope_store` of one new token a sequence, its last one, and then `attention_decode`.

    Args:
        q: [num_seqs, num_heads, head_dim]; k, v: [num_seqs, num_kv_heads, head_dim]: as the QKV projection gives them.
        cos_sin_cache: [max_position, head_dim] float32, as in `rotary_embedding`.
        k_cache, v_cache: as in `attention_decode`; token context_lens[i] - 1 of sequence i is written in place, in the block
            that block_table says.
        block_table, context_lens, max_context_len, scale: as in `attention_decode`; the new token counts, so that every length
            is at least 1. It stands at position context_lens[i] - 1.
        q_weight, k_weight: [head_dim], the dtype of q and k, of the norm of each head; None: no norm. Both or neither.
        eps: of the norm.
        window, soft_cap, k_scale, v_scale: as in `attention_decode`; what is stored is k / k_scale.

    Returns:
        [num_seqs, num_heads, head_dim], the dtype of q. Everything is rounded wherever the separate ops round.
    """
    check_decode(q, k_cache, v_cache, block_table, context_lens, window, soft_cap, k_scale, v_scale, scale)
    check_new_tokens(q, k, v, k_cache, q_weight, k_weight)
    if values_checked(q.device):
        check_attention_values(
            k_cache, block_table, context_lens, max_context_len, least=1, positions=cos_sin_cache.shape[0]
        )
    positions = context_lens.long() - 1
    block_size = k_cache.shape[1]
    blocks = block_table.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slots = blocks * block_size + positions % block_size
    q = qk_norm_rope_store.native(
        positions, q, k, v, cos_sin_cache, k_cache, v_cache, slots, q_weight, k_weight, eps, k_scale, v_scale
    )
    return attention_decode.native(
        q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window, soft_cap, k_scale, v_scale
    )
