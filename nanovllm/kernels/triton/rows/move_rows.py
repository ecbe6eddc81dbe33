"""Moving rows: new keys and values into the paged KV cache, and rows out of the embedding table."""

import functools

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.checks import FP8, check_slots, check_store, check_token_ids, values_checked
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.device_math import to_dtype
from nanovllm.kernels.triton.early_start import can_launch_early
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, next_power_of_2, warps_for
from nanovllm.kernels.triton.rows.plans import POLICY


@functools.cache
def converts_to_fp8(device: torch.device) -> bool:
    """Whether a device has instructions for 8-bit floats: compute capability 8.9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def to_fp8(x):
    """float32 -> the bits of the nearest float8_e4m3fn as uint8. Ties go to even, beyond +-448 the largest number is
    taken, and NaN stays NaN. GPUs without a conversion instruction run these integer operations too.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 20 bits of the mantissa go; the exponent's bias falls from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 a step is 2^-9: adding 2^23 leaves the number of steps, rounded, in the lowest bits.
    tiny = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, tiny, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantised(x, scale_ptr, head, dtype: tl.constexpr, SCALES: tl.constexpr, FP8: tl.constexpr):
    """x / scale as a cache of `dtype` stores it. SCALES: 0 none, 1 one, 2 one a head. FP8: the bits of float8_e4m3fn.

    `head`, the heads of the elements of x, broadcasts to x. It is within bounds even where x is masked.
    """
    if SCALES == 1:
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(tl.load(scale_ptr), x.shape))
    elif SCALES == 2:
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(tl.load(scale_ptr + head), x.shape))
    if FP8:
        x = to_fp8(x.to(tl.float32))
    else:
        x = to_dtype(x, dtype)
    return x


@triton.jit
def store_quantised(target, x, scale_ptr, head, mask, SCALES: tl.constexpr, FP8: tl.constexpr):
    """Store `quantised(x)`. For FP8 `target` points to the bytes of a float8_e4m3fn cache."""
    tl.store(target, quantised(x, scale_ptr, head, target.dtype.element_ty, SCALES, FP8), mask)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _store_kvcache_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_stride, v_stride, k_slot_stride, v_slot_stride, size,
    head_dim,
    BLOCK: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < size
    slot = tl.load(slot_mapping + token).to(tl.int64)
    keys = tl.load(k + token * k_stride + col, mask)
    values = tl.load(v + token * v_stride + col, mask)
    head = tl.minimum(col, size - 1) // head_dim
    store_quantised(k_cache + slot * k_slot_stride + col, keys, k_scale, head, mask, K_SCALES, FP8)
    store_quantised(v_cache + slot * v_slot_stride + col, values, v_scale, head, mask, V_SCALES, FP8)


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, head_dim] with a token's heads next to each other; copied if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def slot_stride(cache: torch.Tensor, name: str) -> int:
    """Elements between the slots of a cache [num_blocks, block_size, num_kv_heads, head_dim].

    Raises:
        ValueError: the slots are not equally spaced, or the heads of a slot are not side by side.
    """
    _, block_size, num_kv_heads, head_dim = cache.shape
    block, slot, head, element = cache.stride()
    if (
        (head, element) != (head_dim, 1)
        or slot < num_kv_heads * head_dim
        or (cache.shape[0] > 1 and block != slot * block_size)
    ):
        raise ValueError(
            f"{name}: expected strides (block_size * s, s, head_dim, 1) with s >= num_kv_heads * head_dim, "
            f"not {tuple(cache.stride())} for shape {tuple(cache.shape)}"
        )
    return slot


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A float8 cache as uint8; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def num_scales(scale: torch.Tensor | None) -> int:
    """The constant SCALES of `store_quantised`."""
    return 0 if scale is None else 1 if len(scale) == 1 else 2


def store_kvcache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The op `store_kvcache`. k and v may have any stride between tokens; other non-contiguous ones are copied."""
    check_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if values_checked(k.device):
        check_slots(slot_mapping, k_cache)
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    k, v = _token_rows(k), _token_rows(v)
    size = num_kv_heads * head_dim
    block = next_power_of_2(size)
    _store_kvcache_kernel[(num_tokens,)](
        k, v, as_bytes(k_cache), as_bytes(v_cache), slot_mapping.contiguous(), k if k_scale is None else k_scale,
        v if v_scale is None else v_scale, k.stride(0), v.stride(0), slot_stride(k_cache, "k_cache"),
        slot_stride(v_cache, "v_cache"), size, head_dim, block, num_scales(k_scale), num_scales(v_scale),
        k_cache.dtype == FP8, num_warps=warps_for(block),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _embedding_kernel(token_ids, weight, y, size, stride, blocks, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = col < size
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    token = tl.load(token_ids + row).to(tl.int64)
    tl.store(y + row * size + col, tl.load(weight + token * stride + col, mask), mask)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op `embedding`. Copies strided ids, and the whole table if its rows are strided (a transposed one).

    Ids are checked if `values_checked` says so. Else an id outside of the table reads foreign memory.
    """
    if values_checked(token_ids.device):
        check_token_ids(token_ids, weight.shape[0])
    size = weight.shape[1]
    y = torch.empty((*token_ids.shape, size), dtype=weight.dtype, device=weight.device)
    rows = token_ids.numel()
    if rows:
        weight = adjacent(weight)
        plan = tunables.EMBEDDING.find(weight.device, *tunables.elements_key(rows, size, weight.dtype))
        block = plan.block if plan else min(next_power_of_2(size), 2048)
        blocks = cdiv(size, block)
        early = can_launch_early(weight)
        _embedding_kernel[(rows * blocks,)](
            token_ids.contiguous(), weight, y, size, weight.stride(0), blocks, block, early, launch_pdl=early,
            num_warps=plan.warps if plan else warps_for(block, 8 if rows <= POLICY.few_rows else 16),
        )  # fmt: skip
    return y
