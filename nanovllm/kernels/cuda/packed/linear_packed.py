"""The ops `linear_int4`, `linear_int8` and `linear_gguf`, and those that combine them with what follows.

The kernels take up to 16 tokens, of int4 on Hopper 128 or, in two parts, 256, and weights that they can read 16 bytes
at a time: see `kernel_weight`. 8-bit floats have a kernel of their own; all other calls go to the provider `triton`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.kernels.cuda.fp8 import linear_fp8
from nanovllm.kernels.cuda.packed.packed_cuda_plan import (
    BOX_FRAGMENTS,
    MAX_TOKENS,
    WARP_ROWS,
    WIDE_FRAGMENTS,
    WIDE_TOKENS,
    PackedCudaPlan,
    box_shared_bytes,
    box_tiles,
    phases_of,
    plan_boxes,
    plan_packed_cuda,
    plan_ring,
    plan_stacked_ring,
    plan_wide,
    turns_of_a_phase,
    wide_shared_bytes,
)
from nanovllm.kernels.cuda.packed.product_libraries import fp8_support, product_kernel, stacked_kernel
from nanovllm.kernels.cuda.packed.stored import GROUP, KernelStorage, KernelWeight, affine, planes_of
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton.gemm import packed_products
from nanovllm.kernels.triton.gemm.fp8_product import has_99_kib
from nanovllm.kernels.triton.gemm.sum_norm import sum_add_rms_norm
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, num_sms
from nanovllm.kernels.triton.rows.activation import silu_and_mul


@functools.cache
def _has_wide(device: torch.device) -> bool:
    """Whether the kernel of wide.cuh runs: its instructions are those of compute capability 9.0 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _wide(x: torch.Tensor) -> bool:
    """Whether rows of bytes can be read 16 bytes at a time, at places of 32 bits."""
    return x.stride(1) == 1 and not x.stride(0) % 16 and not x.data_ptr() % 16 and x.shape[0] * x.stride(0) < 1 << 32


def kernel_weight(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    sums: bool = False,
) -> KernelWeight | None:  # fmt: skip
    """The weight if a kernel takes this call: 1 to 16 tokens of 16 bits (of int4 on Hopper up to 128, if there is a
    plan), columns a multiple of 128, and groups of 128 times a power of two, or a whole row. With GGUF's planes x is
    bfloat16, in which scaled weights are rounded.
    """
    check_storage(storage, scale)
    size = x.shape[-1]
    if storage == "fp8" or x.dtype not in (torch.float16, torch.bfloat16) or not size or size % GROUP:
        return None
    tokens = x.numel() // size
    wide = storage == "int4" and MAX_TOKENS < tokens <= WIDE_TOKENS and _has_wide(x.device)
    wide = wide and plan_wide(weight.shape[0], size // GROUP, tokens, num_sms(x), sums) is not None
    if not (0 < tokens <= MAX_TOKENS or wide) or not _wide(weight):
        return None
    if storage.startswith("Q6_K") and has_99_kib(x.device):
        return None  # the ring alone takes it
    if scale is None:
        return planes_of(size, weight, storage) if x.dtype == torch.bfloat16 else None
    bits = 4 if storage == "int4" else 8
    if weight.shape[1] * 8 != size * bits:
        return None  # the other provider says what is wrong
    return affine(size, weight, scale, zero, bits, x.dtype)


def _takes_ring(w: KernelWeight, x: torch.Tensor, tokens: int) -> bool:
    """Whether the kernel of ring.cuh is a choice. Rows of int4's scales have to begin at multiples of 16 bytes."""
    if w.storage in (KernelStorage.Q4_K, KernelStorage.Q6_K):
        return True
    if w.storage != KernelStorage.INT4 or w.scale is None or x.dtype != torch.bfloat16 or tokens > 8:
        return False
    return not w.scale.stride(0) % 8 and not w.scale.data_ptr() % 16


def takes_boxes(w: KernelWeight, x: torch.Tensor, tokens: int) -> bool:
    """Whether the kernel of box.cuh is a choice: one token on Hopper, else as that of ring.cuh, and Q4_K, or int4 in
    groups of 128 columns, two at a time.
    """
    if w.storage not in (KernelStorage.INT4, KernelStorage.Q4_K) or tokens != 1 or not _has_wide(x.device):
        return False
    return not w.step_shift and not x.shape[-1] % 256 and _takes_ring(w, x, tokens)


def plan_of(w: KernelWeight, x: torch.Tensor, rows: int, tokens: int, gated: bool, sums: bool) -> PackedCudaPlan:
    groups = x.shape[-1] // GROUP
    if tokens > MAX_TOKENS:
        wide = plan_wide(rows, groups, tokens, num_sms(x), sums)
        assert wide is not None  # `kernel_weight` has asked
        return wide
    boxes = plan_boxes(w.kind, rows, groups, num_sms(x), gated) if takes_boxes(w, x, tokens) else None
    ring = None
    if boxes is None and _takes_ring(w, x, tokens):
        ring = plan_ring(w.kind, rows, groups, tokens, num_sms(x), sums, has_99_kib(x.device))
    if w.storage == KernelStorage.Q6_K and ring is None:
        return PackedCudaPlan(1, 8, 1, 1)  # no other kernel takes it
    return boxes or ring or plan_packed_cuda(rows, groups, num_sms(x), sums)


def run_product(
    x: torch.Tensor, w: KernelWeight, bias: torch.Tensor | None, gated: bool = False, sums: bool = False,
    plan: PackedCudaPlan | None = None, y: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[tokens, rows]; gated: [tokens, rows / 2]; sums: float32 [splits, tokens, rows].

    Args:
        plan: replaces the one made.
        y: where the product is written; not with sums.
    """
    x, stride, tokens = _tokens_of(x)
    rows = w.codes.shape[0]
    plan = plan or plan_of(w, x, rows, tokens, gated, sums)
    numbers, splits = _numbers(x, stride, w, tokens, plan, rows, gated, sums)
    if sums:
        y = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    elif y is None:
        y = torch.empty((tokens, rows // (1 + gated)), dtype=x.dtype, device=x.device)
    product_kernel(x.device)(w.storage, x, w.codes, w.scale, w.zero, adjacent(bias), y, numbers)
    return y


def run_stacked(
    x: torch.Tensor, q4_k: KernelWeight, q6_k: KernelWeight, bias: tuple[torch.Tensor | None, torch.Tensor | None],
    q6_k_first: bool, plan: PackedCudaPlan,
) -> torch.Tensor:  # fmt: skip
    """[tokens, rows of both]: the products with a weight in Q4_K and one in Q6_K, in one launch.

    Args:
        bias: of Q4_K's rows, and of Q6_K's.
        q6_k_first: whether the columns of Q6_K's product are in front.
        plan: of ring.cuh.
    """
    x, stride, tokens = _tokens_of(x)
    rows4, rows6 = q4_k.codes.shape[0], q6_k.codes.shape[0]
    numbers4, numbers6 = (_numbers(x, stride, w, tokens, plan, rows4 + rows6)[0] for w in (q4_k, q6_k))
    y = torch.empty((tokens, rows4 + rows6), dtype=x.dtype, device=x.device)
    y4, y6 = (y[:, rows6:], y[:, :rows6]) if q6_k_first else (y[:, :rows4], y[:, rows4:])
    bias4, bias6 = (adjacent(part) for part in bias)
    stacked_kernel(x.device)(x, q4_k.codes, q6_k.codes, bias4, bias6, y4, y6, numbers4, numbers6)
    return y


def _tokens_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(x as kernels read it, the distance of its tokens, how many there are)"""
    x, tokens, stride = matrix_of(x)
    if stride % 8 or x.data_ptr() % 16 or stride < x.shape[-1]:
        x = x.clone(memory_format=torch.contiguous_format)
        stride = x.shape[-1]
    return x, stride, tokens


def _numbers(
    x: torch.Tensor, stride: int, w: KernelWeight, tokens: int, plan: PackedCudaPlan, y_stride: int,
    gated: bool = False, sums: bool = False,
) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """(the numbers that the operators take, splits)"""
    rows, size = w.codes.shape[0], x.shape[-1]
    columns = 512 // w.bits  # of a step
    steps, group_steps = size // columns, GROUP // columns
    split_steps = cdiv(size // GROUP, plan.splits) * group_steps
    splits = cdiv(steps, split_steps)
    boxes = plan.fragments == BOX_FRAGMENTS
    column_warps = plan.warps if boxes else plan.warps // plan.row_warps
    turns = cdiv(split_steps, column_warps)
    panel: tuple[int, ...] = (0,) * 5
    pieces = 0
    if boxes:
        phase, shared_bytes = plan.stages, box_shared_bytes(plan, box_tiles(rows, gated), w.kind)
    elif plan.fragments == WIDE_FRAGMENTS:
        phase, shared_bytes = plan.stages, wide_shared_bytes(plan, tokens)
    elif plan.fragments:
        phases = phases_of(plan, turns, tokens, columns, w.scales, w.section)
        phase, panel, shared_bytes = phases.turns, phases.panel, phases.shared_bytes
        pieces = phases.section_bytes // 16
    else:
        phase = turns_of_a_phase(turns, tokens * column_warps * columns * 2)
        of_x = tokens * phase * column_warps * columns * 2
        shared_bytes = max(of_x, (column_warps - 1) * plan.row_warps * WARP_ROWS * 8 * cdiv(tokens, 8) * 4)
    scale_stride = 0 if w.scale is None else w.scale.stride(0)
    numbers = (
        stride, w.codes.stride(0), scale_stride, *w.planes, tokens, rows, steps, split_steps, phase, plan.row_warps,
        w.step_shift, w.middle, gated, sums, *panel, y_stride, column_warps, -(-65536 // column_warps),
        w.section_start, pieces, splits, plan.warps, shared_bytes, plan.fragments, plan.stages,
    )  # fmt: skip
    return numbers, splits


def _product(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    bias: torch.Tensor | None, otherwise: Callable[..., torch.Tensor], *arguments: Any,
) -> torch.Tensor:  # fmt: skip
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"bias: expected {x.dtype}, as x, not {bias.dtype}")
    parts = _parts(x, storage, weight, scale, zero)
    return _joined(x, parts, bias) if parts else otherwise(x, weight, *arguments, bias)


Part = tuple[torch.Tensor, KernelWeight]
"""Some of the tokens, and the weight that a kernel multiplies with them."""


def _parts(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    sums: bool = False,
) -> list[Part]:  # fmt: skip
    """All tokens of x, or the first `WIDE_TOKENS` and the rest: 129 to 256 tokens of int4 on Hopper are two products.

    Empty: another provider takes this call.
    """
    size = x.shape[-1]
    xs = [x]
    if storage == "int4" and size and WIDE_TOKENS < x.numel() // size <= 2 * WIDE_TOKENS and _has_wide(x.device):
        xs = list(x.reshape(-1, size).split(WIDE_TOKENS))
    ws = [kernel_weight(part, storage, weight, scale, zero, sums) for part in xs]
    found = [(part, w) for part, w in zip(xs, ws) if w is not None]
    return found if len(found) == len(xs) else []


def _joined(x: torch.Tensor, parts: list[Part], bias: torch.Tensor | None, gated: bool = False) -> torch.Tensor:
    """[..., rows]; gated: [..., rows / 2]."""
    width = parts[0][1].codes.shape[0] // (1 + gated)
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    for (part, w), of_part in zip(parts, y.view(-1, width).split(WIDE_TOKENS), strict=True):
        run_product(part, w, bias, gated, y=of_part)
    return y


def linear_int4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_int4`."""
    return _product(x, "int4", weight, scale, zero, bias, packed_products.linear_int4, scale, zero)


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_int8`."""
    return _product(x, "int8", weight, scale, zero, bias, packed_products.linear_int8, scale, zero)


def linear_gguf(
    x: torch.Tensor, weight: torch.Tensor, kind: str, bias: torch.Tensor | None = None,
    below: torch.Tensor | None = None, below_kind: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_gguf`."""
    if below is None or below_kind is None:
        return _product(x, kind, weight, None, None, bias, packed_products.linear_gguf, kind)
    rows = weight.shape[0], below.shape[0]
    parts = (None, None) if bias is None else bias.split(rows)
    y = _stacked(x, (weight, below), (kind, below_kind), parts)
    if y is not None:
        return y.view(*x.shape[:-1], sum(rows))
    return torch.cat([linear_gguf(x, weight, kind, parts[0]), linear_gguf(x, below, below_kind, parts[1])], -1)


def _stacked(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], kinds: tuple[str, ...], bias: tuple[torch.Tensor | None, ...]
) -> torch.Tensor | None:
    """The products of `linear_gguf` with two weights, if one launch takes them: one in Q4_K and one in Q6_K."""
    if any(part is not None and part.dtype != x.dtype for part in bias) or x.dtype != torch.bfloat16:
        return None
    both = [kernel_weight(x, kind, weight, None, None) for kind, weight in zip(kinds, weights, strict=True)]
    by_storage = {w.storage: (w, part) for w, part in zip(both, bias, strict=True) if w is not None}
    if by_storage.keys() != {KernelStorage.Q4_K, KernelStorage.Q6_K} or has_99_kib(x.device):
        return None
    (q4_k, bias4), (q6_k, bias6) = by_storage[KernelStorage.Q4_K], by_storage[KernelStorage.Q6_K]
    size = x.shape[-1]
    plan = plan_stacked_ring((len(weights[0]), len(weights[1])), size // GROUP, x.numel() // size, num_sms(x))
    if plan is None or not all(_is_whole(w, plan, size, x.numel() // size) for w in (q4_k, q6_k)):
        return None
    return run_stacked(x, q4_k, q6_k, (bias4, bias6), both[0] is q6_k, plan)


def _is_whole(w: KernelWeight, plan: PackedCudaPlan, size: int, tokens: int) -> bool:
    """Whether a block of ring.cuh has room for all scales of its rows."""
    columns = 512 // w.bits
    turns = cdiv(size // columns, plan.warps // plan.row_warps)
    return phases_of(plan, turns, tokens, columns, w.scales, w.section).section_bytes > 0


def _takes_fp8(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """As `linear_fp8.takes`; its library is another than this folder's, for which the provider was selected."""
    return linear_fp8.takes(x, weight, gated) and _has_fp8(x.device)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return fp8_support(device) is None


def linear_packed_silu_and_mul(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None
) -> torch.Tensor:
    """The op `linear_packed_silu_and_mul`."""
    if storage == "fp8" and scale is not None and _takes_fp8(x, weight, gated=True):
        return linear_fp8.fp8_product(x, weight, scale, gated=True).view(*x.shape[:-1], weight.shape[0] // 2)
    parts = _parts(x, storage, weight, scale, zero)
    if not parts:
        return silu_and_mul(packed_products.packed_product(x, storage, weight, scale, zero)[0])
    return _joined(x, parts, None, gated=True)


def linear_packed_add_rms_norm(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op `linear_packed_add_rms_norm`: blocks leave sums, and one more kernel adds them and norms."""
    if storage == "fp8" and scale is not None and _takes_fp8(x, weight):
        return sum_add_rms_norm(linear_fp8.fp8_product(x, weight, scale, sums=True), bias, residual, norm_weight, eps)
    parts = _parts(x, storage, weight, scale, zero, sums=True)
    if not parts:
        return packed_products.linear_packed_add_rms_norm(
            x, storage, weight, scale, zero, residual, norm_weight, eps, bias
        )
    sums = [run_product(part, w, None, sums=True) for part, w in parts]
    return sum_add_rms_norm(sums, bias, residual, norm_weight, eps)


# `num_tokens` of the providers: with other numbers of tokens, layers call the separate ops.


def num_tokens_linear_packed_silu_and_mul(weight: torch.Tensor) -> range:
    """Of 8-bit floats as many as their kernel takes, in rows as long as it takes. Of 17 tokens and more int4 alone has
    a kernel; others have two, as separate ops.
    """
    if weight.dtype != torch.uint8:
        return linear_fp8.num_tokens_gated(weight)
    return range(1, (2 * WIDE_TOKENS if _has_wide(weight.device) else MAX_TOKENS) + 1)


num_tokens_linear_packed_add_rms_norm = packed_products.num_tokens_linear_packed_add_rms_norm
