"""Moving rows: new keys and values into the paged KV cache, and the embedding table's rows out of it."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._launch import cdiv, next_power_of_2, warps_for
from nanovllm.kernels.triton_ops._math import to_dtype


@triton.jit
def _store_kvcache_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, k_slot_stride, v_slot_stride, size, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < size
    slot = tl.load(slot_mapping + token).to(tl.int64)
    keys = tl.load(k + token * k_stride + col, mask)
    values = tl.load(v + token * v_stride + col, mask)
    tl.store(k_cache + slot * k_slot_stride + col, to_dtype(keys, k_cache.dtype.element_ty), mask)
    tl.store(v_cache + slot * v_slot_stride + col, to_dtype(values, v_cache.dtype.element_ty), mask)


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, head_dim] with a token's heads next to each other; copied if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def slot_stride(cache: torch.Tensor, name: str) -> int:
    """Elements between the slots of a cache [num_blocks, block_size, num_kv_heads, head_dim].

    Raises:
        ValueError: slots are not equally spaced, or a slot's heads not next to each other. (A copy would not be written to.)
    """
    _, block_size, num_kv_heads, head_dim = cache.shape
    block, slot, head, element = cache.stride()
    if (head, element) != (head_dim, 1) or slot < num_kv_heads * head_dim or (cache.shape[0] > 1 and block != slot * block_size):
        raise ValueError(
            f"{name}: expected strides (block_size * s, s, head_dim, 1) with s >= num_kv_heads * head_dim, "
            f"not {tuple(cache.stride())} for shape {tuple(cache.shape)}"
        )
    return slot


def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The op `store_kvcache`. k and v may have any stride between tokens; other non-contiguous ones are copied."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    k, v = _token_rows(k), _token_rows(v)
    size = num_kv_heads * head_dim
    block = next_power_of_2(size)
    _store_kvcache_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0),
        slot_stride(k_cache, "k_cache"), slot_stride(v_cache, "v_cache"), size, block, num_warps=warps_for(block),
    )  # fmt: skip


@triton.jit
def _embedding_kernel(token_ids, weight, y, size, stride, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = col < size
    token = tl.load(token_ids + row).to(tl.int64)
    tl.store(y + row * size + col, tl.load(weight + token * stride + col, mask), mask)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op `embedding`. Ids are not checked: one outside the table reads foreign memory. Copies strided ids."""
    size = weight.shape[1]
    y = torch.empty((*token_ids.shape, size), dtype=weight.dtype, device=weight.device)
    rows = token_ids.numel()
    if rows:
        if weight.stride(1) != 1:
            raise ValueError(f"weight: expected a last stride of 1, not {weight.stride(1)}")
        block = min(next_power_of_2(size), 2048)
        blocks = cdiv(size, block)
        _embedding_kernel[(rows * blocks,)](
            token_ids.contiguous(), weight, y, size, weight.stride(0), blocks, block, num_warps=warps_for(block)
        )
    return y
