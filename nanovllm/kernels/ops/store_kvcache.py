"""Writing new keys and values into the paged KV cache."""

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.checks import FP8, check_slots, check_store, values_checked

FP8_MAX = 448.0
"""The largest float8_e4m3fn; what lies beyond is stored as this, since the format has no infinity."""


def value_inputs(t, num_tokens, num_kv_heads, head_dim, block_size):
    """Values to be stored, and where."""
    num_blocks = -(-num_tokens // block_size) + 2
    cache = (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        "v": t.normal(num_tokens, num_kv_heads, head_dim),
        "k_cache": t.normal(*cache).contiguous(),
        "v_cache": t.normal(*cache).contiguous(),
        "slot_mapping": t.permutation(num_blocks * block_size)[:num_tokens],
    }


VALUE_PATTERNS = {
    "v": "[num_tokens, num_kv_heads, head_dim]",
    "k_cache": "any[num_blocks, block_size, num_kv_heads, head_dim]",
    "v_cache": "any[num_blocks, block_size, num_kv_heads, head_dim]",
    "slot_mapping": "int64[num_tokens]",
    "k_scale": "float32[1] | float32[num_kv_heads]",
    "v_scale": "float32[1] | float32[num_kv_heads]",
}


def _inputs(t, num_tokens, num_kv_heads, head_dim, block_size):
    k = t.normal(num_tokens, num_kv_heads, head_dim)
    return {"k": k, **value_inputs(t, num_tokens, num_kv_heads, head_dim, block_size)}


def _cost(k, v, k_cache, v_cache, slot_mapping, **_):
    written = (k.numel() + v.numel()) * k_cache.element_size()
    return Cost(nbytes(k, v, slot_mapping) + written)


@op(
    arguments={"k": "[num_tokens, num_kv_heads, head_dim]", **VALUE_PATTERNS},
    inputs=Inputs(
        _inputs,
        small=[(1, 1, 2, 16), (5, 3, 64, 16), (0, 2, 64, 16), (37, 2, 80, 32), (9, 1, 256, 16)],
        decode=[(1, 8, 128, 256), (64, 8, 128, 256), (256, 8, 128, 256)],
        large=[(16384, 8, 128, 256)],
        scales=(1.0,),
    ),
    cost=_cost,
    mutates=("k_cache", "v_cache"),
    fake=lambda *args, **kwargs: None,
)
def store_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy row i of k and v to cache slot `slot_mapping[i]`, in place.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], any float dtype.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; of another dtype than k and v, float8_e4m3fn
            among them, they get the nearest value, and float8 its largest where k / k_scale is beyond it.
        slot_mapping: [num_tokens] int64, block * block_size + offset. Every entry is valid: padding rows point
            into the padding block, which no sequence owns, so that no row needs a test (and a CUDA graph no branch).
        k_scale, v_scale: float32 [1] or [num_kv_heads], contiguous; what is stored is k / k_scale. None: 1.

    Raises:
        ValueError: arguments do not fit together; or a slot is outside of the cache, which is checked on a CPU,
            elsewhere with NANOVLLM_CHECK=1.
    """
    check_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if values_checked(k.device):
        check_slots(slot_mapping, k_cache)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        stored, rows = quantised(x, cache.dtype, scale), cache
        if cache.dtype == FP8:  # not every device can index the 8-bit floats
            stored, rows = stored.view(torch.uint8), cache.view(torch.uint8)
        rows.flatten(0, 1)[slot_mapping] = stored


def quantised(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """x [num_tokens, num_kv_heads, head_dim] / scale, rounded to a cache's dtype, float8 after clamping."""
    if scale is not None:
        x = x.to(torch.promote_types(x.dtype, torch.float32)) / scale[:, None]
    if dtype == FP8:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)
