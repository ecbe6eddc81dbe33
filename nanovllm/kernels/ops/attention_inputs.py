"""Declarations of the attention ops: arguments, inputs and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nanovllm.kernels.op.inputs import Cost, Inputs, Tensors, at_least_one, nbytes

NEW_TOKENS = {
    "k": "[num_seqs, num_kv_heads, head_dim]",
    "v": "[num_seqs, num_kv_heads, head_dim]",
    "cos_sin_cache": "float32[max_position, head_dim]",
    "q_weight": "[head_dim]",
    "k_weight": "[head_dim]",
}
_CACHE = "any[num_blocks, block_size, num_kv_heads, head_dim]"
_COMMON = {
    "k_cache": _CACHE,
    "v_cache": _CACHE,
    "block_table": "int32[num_seqs, max_blocks]",
    "context_lens": "int32[num_seqs]",
    "k_scale": "float32[1] | float32[num_kv_heads]",
    "v_scale": "float32[1] | float32[num_kv_heads]",
}


def _paged(t: Tensors, lens: torch.Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, Any]:
    """A cache whose blocks are shuffled, each owned by one sequence; slots that no sequence uses are NaN."""
    num_seqs, longest = len(lens), max(lens.tolist(), default=0)
    max_blocks = max(1, -(-longest // block_size))
    order = t.permutation(num_seqs * max_blocks + 1, torch.int32).contiguous()  # as the op wants its columns
    table = order[: num_seqs * max_blocks].view(num_seqs, max_blocks)
    return cache_of(t, table, lens, num_kv_heads, head_dim, block_size)


def cache_of(
    t: Tensors, table: torch.Tensor, lens: torch.Tensor, num_kv_heads: int, head_dim: int, block_size: int
) -> dict[str, Any]:
    """A cache with a block more than `table` has entries; slots that no sequence uses are NaN."""
    used = torch.zeros(table.numel() + 1, block_size, dtype=torch.bool)
    slots = torch.arange(table.shape[1] * block_size).view(-1, block_size)
    for blocks, length in zip(table.long().cpu(), lens.tolist()):
        used[blocks] |= slots < length  # sequences may share blocks
    k, v = (t.normal(*used.shape, num_kv_heads, head_dim, scale=1).contiguous() for _ in range(2))
    for cache in (k, v):
        cache.masked_fill_(~used[:, :, None, None].to(t.device), math.nan)
    table, lens = table.to(t.device), lens.to(t.device, torch.int32)
    return {"k_cache": k, "v_cache": v, "block_table": table, "context_lens": lens}


def _lengths(t: Tensors, num_seqs: int, least: int, most: int) -> torch.Tensor:
    """Lengths from least to most, both among them where there are two sequences or more."""
    lens = t.integers(least, most + 1, num_seqs).cpu()
    if num_seqs:
        lens[0] = most
        lens[-1] = least if num_seqs > 1 else most
    return lens


def lengths_and_heads(numbers: Mapping[str, int]) -> str | None:
    """What a shape of an attention op needs (`Inputs.needs`)."""
    least, most = numbers["least"], numbers["most"]
    if least > most:
        return f"LEAST up to MOST, the shortest and the longest run or context, not {least} and {most}; exchange them"
    return at_least_one("num_heads", "num_kv_heads", "head_dim", "block_size")(numbers)


def _decode_inputs(t, num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size):
    return _few_inputs(t, num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size)


def projected_inputs(t: Tensors, attended: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `attention_decode` or `attention_decode_shared`, and the new tokens of the op that comes with a
    projection.
    """
    num_seqs = len(attended["context_lens"])
    _, _, num_kv_heads, head_dim = attended["k_cache"].shape
    k, v = (t.normal(num_seqs, num_kv_heads, head_dim) for _ in range(2))
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(attended["max_context_len"] + 1), frequencies)
    return {
        "q": attended.pop("q"),
        "k": k,
        "v": v,
        "cos_sin_cache": t.spread(torch.cat((angles.cos(), angles.sin()), -1).to(t.device, torch.float32)),
        **attended,
        "q_weight": t.parameter(head_dim, scale=1),
        "k_weight": t.parameter(head_dim, scale=1),
        "eps": 1e-6,
    }


def with_new_tokens(cost: Cost, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Cost:
    """The cost of an op with new tokens, whose keys and values are among what `cost` reads.

    Here they come from the projection, and go to the cache.
    """
    return Cost(cost.bytes + nbytes(k, v), cost.flops + 7 * (q.numel() + k.numel()))


def _few_inputs(t, num_seqs, least, most, num_heads, num_kv_heads, head_dim, block_size, query_tokens=1):
    lens = _lengths(t, num_seqs, least, most)
    return {
        "q": t.normal(num_seqs * query_tokens, num_heads, head_dim),
        **_paged(t, lens, num_kv_heads, head_dim, block_size),
        "max_context_len": most,
        "scale": head_dim**-0.5,
    }


def _decode_cost(q, k_cache, v_cache, block_table, context_lens, max_context_len, scale, window=None, **_):
    n = len(q) // max(1, len(context_lens))
    # What each query sees, and what those of a sequence see together.
    seen = (context_lens[:, None] - torch.arange(n, device=context_lens.device)).clamp(0, window)
    attended = context_lens if window is None else context_lens.clamp_max(window + n - 1)
    return _cost(q, k_cache, int(attended.sum()), int(seen.sum()))


def _prefill_inputs(t, num_seqs, least, most, cached, num_heads, num_kv_heads, head_dim, block_size):
    new = _lengths(t, num_seqs, least, most)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    starts[1:] = new.cumsum(0)
    return {
        "q": t.normal(int(starts[-1]), num_heads, head_dim),
        **_paged(t, new + cached, num_kv_heads, head_dim, block_size),
        "max_context_len": most + cached,
        "cu_seqlens_q": starts.to(t.device),
        "max_query_len": most,
        "scale": head_dim**-0.5,
    }


def _prefill_cost(
    q, k_cache, v_cache, block_table, context_lens, max_context_len, cu_seqlens_q, max_query_len, scale, window=None,
    **_
):  # fmt: skip
    new = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    lens = context_lens.long()
    if window is None:
        pairs = new * lens - new * (new - 1) // 2
    else:  # query j of a run sees min(window, its position + 1) tokens
        pairs = torch.stack(
            [torch.arange(n - m + 1, n + 1).clamp_max(window).sum() for m, n in zip(new.tolist(), lens.tolist())]
        )
    return _cost(q, k_cache, int(lens.sum()), int(pairs.sum()))


def _cost(q: torch.Tensor, cache: torch.Tensor, tokens: int, pairs: int) -> Cost:
    """tokens: keys that are read; pairs: of a query token and a key that it sees."""
    num_heads, head_dim = q.shape[1:]
    read = 2 * tokens * cache.shape[2] * head_dim * cache.element_size()
    return Cost(2 * nbytes(q) + read, 4 * pairs * num_heads * head_dim)


def like_queries(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of an attention op, without values."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


# A score of a few hundred is off by some 1e-5 in float32, and so is the logarithm of its weight.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

DECODE: dict[str, Any] = {
    "arguments": {"q": "[num_seqs, num_heads, head_dim]", **_COMMON},
    "inputs": Inputs(
        _decode_inputs,
        small=[
            (1, 1, 1, 1, 1, 64, 16), (3, 1, 40, 4, 2, 64, 16), (2, 5, 70, 9, 3, 80, 32), (2, 17, 33, 7, 1, 96, 16),
            (1, 130, 130, 4, 4, 128, 64), (0, 1, 1, 4, 2, 64, 16),
        ],
        # The cases of docs/attention.md: Qwen3-0.6B's heads, then Qwen3-8B's.
        decode=[
            (1, 512, 512, 16, 8, 128, 256), (1, 4096, 4096, 16, 8, 128, 256), (1, 32768, 32768, 16, 8, 128, 256),
            (8, 1024, 1024, 32, 8, 128, 256), (64, 1024, 1024, 16, 8, 128, 256),
        ],
        large=[
            (256, 800, 800, 16, 8, 128, 256),
            (256, 2048, 2048, 32, 8, 128, 256),
            (256, 100, 2000, 16, 8, 128, 256),
        ],
        variants=[{}, {"window": 20}, {"soft_cap": 50.0}],
        scales=(1.0, 10.0, 30.0),  # at 10 a score is about the cap, at 30 far beyond it
        needs=lengths_and_heads,
    ),
    "cost": _decode_cost,
    "tolerance": _TOLERANCE,
    "fake": like_queries,
}  # fmt: skip

_INPUTS = DECODE["inputs"]
# `attention_decode` itself: what is built upon it has one query token a sequence.
FEW: dict[str, Any] = {
    **DECODE,
    "arguments": {**DECODE["arguments"], "q": "[num_tokens, num_heads, head_dim]"},
    "inputs": replace(
        _INPUTS,
        make=_few_inputs,
        # The last number: query tokens a sequence. Lengths below it; more rows than a tile has, and of no power of two.
        small=[
            *_INPUTS.small,
            (3, 1, 40, 4, 2, 64, 16, 2),
            (2, 2, 50, 8, 2, 64, 16, 4),
            (1, 130, 130, 4, 4, 128, 64, 8),
            (3, 5, 70, 9, 3, 80, 32, 5),
            (2, 17, 33, 7, 1, 96, 16, 3),
        ],
        decode=[
            *_INPUTS.decode,
            (1, 32768, 32768, 16, 8, 128, 256, 2),
            (1, 4096, 4096, 16, 8, 128, 256, 4),
            (8, 1024, 1024, 32, 8, 128, 256, 8),
        ],
    ),
}

PREFILL: dict[str, Any] = {
    "arguments": {
        "q": "[num_tokens, num_heads, head_dim]",
        **_COMMON,
        "cu_seqlens_q": "int32[num_starts]",
    },
    "inputs": Inputs(
        _prefill_inputs,
        small=[
            (1, 1, 1, 0, 1, 1, 64, 16),
            (2, 3, 40, 0, 4, 2, 64, 16),
            (2, 2, 33, 29, 9, 3, 80, 32),
            (1, 70, 70, 5, 7, 1, 96, 16),
            (1, 65, 65, 0, 4, 4, 128, 64),
        ],
        decode=[(8, 128, 128, 0, 16, 8, 128, 256), (1, 512, 512, 3584, 32, 8, 128, 256)],
        large=[
            (16, 1024, 1024, 0, 32, 8, 128, 256),
            (4, 4096, 4096, 0, 32, 8, 128, 256),
            (1, 16384, 16384, 0, 32, 8, 128, 256),
        ],
        variants=[{}, {"window": 20}, {"soft_cap": 50.0}],
        scales=(1.0, 10.0, 30.0),  # at 10 a score is about the cap, at 30 far beyond it
        needs=lengths_and_heads,
    ),
    "cost": _prefill_cost,
    "tolerance": _TOLERANCE,
    "fake": like_queries,
}
