"""Attention over keys and values that lie in one tensor a batch, as the caches of transformers have them."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, at_least_one, nbytes


def _inputs(t, batch, queries, length, num_heads, num_kv_heads, head_dim, padding=0):
    # The last slot is not filled yet, as in a static cache, where there is one to spare.
    filled = max(queries, length - 1)
    visible = torch.arange(filled - queries + 1, filled + 1).repeat(batch, 1)
    tokens = None
    if padding:
        # Sequence i has i * padding tokens fewer: its first slots hold padding.
        pads = (torch.arange(batch) * padding).clamp_max(length - 1)[:, None]
        real = torch.arange(length) >= pads
        tokens = torch.argsort(~real, dim=1, stable=True).to(t.device, torch.int32)
        visible = (visible - pads).clamp_min(0)
    return {
        "q": t.normal(batch, num_heads, queries, head_dim),
        "k": t.normal(batch, num_kv_heads, length, head_dim, scale=1),
        "v": t.normal(batch, num_kv_heads, length, head_dim, scale=1),
        "visible": visible.to(t.device, torch.int32),
        "scale": head_dim**-0.5,
        "tokens": tokens,
    }


def _needs(numbers):
    if numbers["queries"] > numbers["length"]:
        return f"QUERIES up to LENGTH, not {numbers['queries']} and {numbers['length']}"
    return at_least_one("queries", "num_heads", "num_kv_heads", "head_dim")(numbers)


def _cost(q, k, v, visible, scale, tokens=None, window=None, soft_cap=None):
    pairs = int(visible.clamp_max(window).sum()) if window else int(visible.sum())
    read = int(visible.amax(1).sum()) if visible.numel() else 0
    head_bytes = k.shape[1] * k.shape[3] * k.element_size()
    return Cost(2 * nbytes(q) + 2 * read * head_bytes, 4 * pairs * q.shape[1] * q.shape[3])


def _fake(q, k, v, visible, scale, tokens=None, window=None, soft_cap=None):
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))


@op(
    arguments={
        "q": "[batch, num_heads, queries, head_dim]", "k": "[batch, num_kv_heads, length, head_dim]",
        "v": "[batch, num_kv_heads, length, head_dim]", "visible": "int32[batch, queries]",
        "tokens": "int32[batch, length]",
    },
    inputs=Inputs(
        _inputs,
        needs=_needs,
        small=[
            (1, 1, 1, 1, 1, 64), (2, 1, 33, 4, 2, 64), (3, 1, 64, 6, 2, 80, 20), (2, 5, 5, 4, 1, 64),
            (2, 19, 40, 4, 2, 64, 6), (3, 12, 12, 4, 2, 64, 5), (1, 66, 66, 2, 2, 128), (0, 1, 4, 2, 1, 64),
        ],
        # Qwen3-0.6B's heads, then Qwen3-8B's.
        decode=[(1, 1, 1024, 16, 8, 128), (32, 1, 1024, 16, 8, 128), (32, 1, 1024, 32, 8, 128)],
        large=[(4, 2048, 2048, 16, 8, 128), (4, 2048, 2048, 32, 8, 128), (4, 2048, 2048, 16, 8, 128, 200)],
        variants=[{}, {"window": 7}, {"soft_cap": 30.0}],
        scales=(1.0, 10.0),
    ),
    cost=_cost,
    fake=_fake,
    # As attention over the paged cache.
    tolerance={torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2},
)  # fmt: skip
def attention_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    tokens: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention over keys and values in one tensor a batch, with any padding.

    Args:
        q: [batch, num_heads, queries, head_dim], any strides.
        k, v: [batch, num_kv_heads, length, head_dim], same dtype, any strides. Query head h reads KV head
            h // (num_heads / num_kv_heads).
        visible: [batch, queries] int32: how many tokens each query sees, its own included. From one query to the next
            it grows by 1; 0 marks a query that is padding.
        scale: multiplies q @ k.
        tokens: [batch, length] int32: the slots of each sequence's tokens in order, then the slots that hold padding. A
            query sees the first `visible` of them. None: no slot holds padding, and no query is padding.
        window: if given, a query sees the last `window` of its tokens only.
        soft_cap: if given, a score s, scale included, becomes soft_cap * tanh(s / soft_cap).

    Returns:
        [batch, queries, num_heads, head_dim], contiguous, the dtype of q; zeros for a query that sees nothing.

    Raises:
        ValueError: sizes or dtypes that do not fit together, or a window or soft_cap that is not positive.
    """
    check_attention_dense(q, k, v, window, soft_cap)
    group = q.shape[1] // k.shape[1]
    mask = dense_mask(visible, k.shape[2], tokens, window)[:, None]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if soft_cap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = soft_cap * torch.tanh((q.to(wide) @ k.to(wide).mT) * scale / soft_cap)
        out = (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.to(wide)).to(q.dtype)
    # A query that sees nothing has no largest score: its softmax is NaN, or 0 in some versions.
    return out.masked_fill(~mask.any(-1, keepdim=True), 0).transpose(1, 2).contiguous()


def dense_mask(
    visible: torch.Tensor, length: int, tokens: torch.Tensor | None = None, window: int | None = None
) -> torch.Tensor:
    """Which slots each query sees: [batch, queries, length] bool. Arguments as of `attention_dense`."""
    ends = visible[..., None].long()
    place = torch.arange(length, device=visible.device).expand(visible.shape[0], length)
    if tokens is not None:  # the inverse: the place of each slot in the order of the tokens
        place = torch.zeros_like(tokens, dtype=torch.int64).scatter(1, tokens.long(), place)
    mask = place[:, None] < ends
    return mask if window is None else mask & (place[:, None] >= ends - window)


def check_attention_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, soft_cap: float | None
) -> None:
    """ValueError, naming the argument, for what no provider of `attention_dense` can take."""
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: expected a multiple of the {k.shape[1]} heads of k, not {q.shape[1]}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected None or at least 1, not {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: expected None or a positive number, not {soft_cap}")
