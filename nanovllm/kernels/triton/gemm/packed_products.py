"""The ops `linear_fp8`, `linear_int4`, `linear_int8` and `linear_gguf`, and those that combine them with what follows.

Up to `MAX_TOKENS` tokens of 16 bits run one kernel that decodes the weight in registers (`packed_kernels`), and adds
sums in a second one if programs share columns. Otherwise the weight is dequantised and the library multiplies. So are
weights in rows of odd lengths, with groups of odd sizes, and GGUF's blocks as stored, which loads cannot read wide.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton.language as tl

from nanovllm.kernels.ops.gguf_blocks import check_gguf, dequantise_gguf
from nanovllm.kernels.ops.linear_fp8 import block_shape
from nanovllm.kernels.ops.linear_int4 import group_size
from nanovllm.kernels.ops.linear_packed import check_storage
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm.packed_dequantise import dequantised, dequantised_gguf, planes_of
from nanovllm.kernels.triton.gemm.packed_kernels import group_kernel, part_kernel
from nanovllm.kernels.triton.gemm.packed_plan import (
    MAX_TOKENS,
    PackedPlan,
    columns_of_a_tile,
    has_shared_operands,
    plan_packed_product,
    tokens_of_a_program,
)
from nanovllm.kernels.triton.gemm.stream_kernel import finish_splits
from nanovllm.kernels.triton.gemm.sum_norm import sum_add_rms_norm
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, num_sms
from nanovllm.kernels.triton.rows.norm import add_rms_norm

_ALL = 1 << 30
"""Rows or words that share a scale, where all do."""
GROUP_COLUMNS = 128
"""Of a tile of `group_kernel`, to all of which a scale belongs."""
SIXTEEN = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


Form = Literal["product", "sums"]
"""What a product is wanted as. "product": x W^T + b. "sums": float32 [splits, num_tokens, outputs] without bias, which
another kernel adds.
"""
Formed = tuple[torch.Tensor, bool]
"""(result, whether it has the form that was wanted); if not it is the product [..., outputs]."""


@dataclass(frozen=True)
class _Call:
    """What the kernels of few tokens have in common."""

    x: torch.Tensor  # [num_tokens, words] of integers
    weight: torch.Tensor  # int16 [num_rows, words]
    bias: torch.Tensor | None
    dtype: torch.dtype
    form: Form
    num_tokens: int
    tokens: int  # of a program


def _few(x: torch.Tensor, weight: torch.Tensor, bits: int, bias: torch.Tensor | None, form: Form) -> _Call | None:
    """The operands of a kernel of few tokens for weight uint8 [num_rows, bytes]; None: it does not take them."""
    size, per = x.shape[-1], 16 // bits
    if x.dtype not in SIXTEEN or not size or size % 32 or weight.shape[0] < 1:
        return None
    num_tokens = x.numel() // size
    if not 0 < num_tokens <= MAX_TOKENS:
        return None
    if weight.stride(1) != 1 or weight.stride(0) % 2 or weight.data_ptr() % 16 or weight.storage_offset() % 2:
        return None
    x, _, stride = matrix_of(x)
    if stride % per or x.storage_offset() % per or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    tokens = tokens_of_a_program(num_tokens, _shared_operands(x.device))
    words = x.reshape(num_tokens, size).view(torch.int64 if per == 4 else torch.int32)
    return _Call(words, weight.view(torch.int16), adjacent(bias), x.dtype, form, num_tokens, tokens)


def _launch(
    kernel: Any, call: _Call, storage: str, bits: int, tensors: tuple[Any, ...], numbers: tuple[int, ...],
    shape: torch.Size, plan: PackedPlan | None = None, **constants: Any,
) -> Formed:  # fmt: skip
    """shape: of x."""
    x, weight, num_tokens, tokens = call.x, call.weight, call.num_tokens, call.tokens
    num_rows, words, parts = weight.shape[0], x.shape[1], kernel is part_kernel
    if plan is None:
        size, rounded = words * 16 // bits, tunables.packed_tokens(num_tokens)
        key = rounded, num_rows, size, call.dtype, storage, bits, parts
        plan = tunables.PACKED_PRODUCT.find(x.device, *key) or plan_packed_product(
            rounded, num_rows, size, bits, parts, num_sms(x), _shared_operands(x.device)
        )
    block = columns_of_a_tile(tokens, bits, parts) * bits // 16
    blocks = cdiv(words, block)
    split_blocks = cdiv(blocks, min(plan.splits, blocks))
    splits = cdiv(blocks, split_blocks)
    y = torch.empty((*shape[:-1], num_rows), dtype=call.dtype, device=x.device)
    target = y if splits == 1 else torch.empty((splits, num_tokens, num_rows), dtype=torch.float32, device=x.device)
    pdl = has_dependent_launch(x.device)
    kernel[cdiv(num_rows, plan.rows), splits, cdiv(num_tokens, tokens)](
        x, weight, *tensors, call.bias, target, num_tokens, num_rows, words, split_blocks * block, x.stride(0),
        weight.stride(0), *numbers, DTYPE=SIXTEEN[call.dtype], BITS=bits, TOKENS=tokens, ROWS=plan.rows, BLOCK=block,
        SPLIT=splits > 1, MASK=words % block != 0, STAGES=plan.stages, PDL=pdl,
        num_warps=plan.warps, launch_pdl=pdl, **constants,
    )  # fmt: skip
    if splits == 1:
        return y, call.form != "sums"
    if call.form == "sums":
        return target, True
    finish_splits(target, call.bias, y.view(num_tokens, num_rows), "none", False, pdl)
    return y, True


@functools.cache
def _shared_operands(device: torch.device) -> bool:
    return device.type != "cuda" or has_shared_operands(torch.cuda.get_device_capability(device)[0])


def _check(x: torch.Tensor, size: int, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless x has `size` columns and bias x's dtype. Layers do not check that."""
    if x.shape[-1] != size:
        raise ValueError(f"x: expected [..., {size}], as the weight has, not {list(x.shape)}")
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"bias: expected {x.dtype}, as x, not {bias.dtype}")


def _linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, plan: PackedPlan | None,
    form: Form = "product",
) -> Formed:  # fmt: skip
    size = weight.shape[1]
    _check(x, size, bias)
    height, width = block_shape(weight, scale)
    scale, codes = adjacent(scale), adjacent(weight).view(torch.uint8)
    scale_rows = _ALL if scale.shape[0] == 1 else height
    call = _few(x, codes, 8, bias, form)
    if call is not None:
        scale_words = _ALL if scale.shape[1] == 1 else width // 2
        return _launch(
            group_kernel, call, "fp8", 8, (scale, None), (scale.stride(0),), x.shape, plan, FLOATS=True,
            SCALE_ROWS=scale_rows, SCALE_WORDS=scale_words,
        )  # fmt: skip
    columns = _ALL if scale.shape[1] == 1 else width
    w = dequantised(codes, size, x.dtype, scale, bits=8, floats=True, d_rows=scale_rows, d_columns=columns)
    # As in the reference: interpreted on a CPU with AMX, the library would read NaN from between the rows of x.
    return F.linear(x.contiguous(), w, bias), form == "product"


def _linear_int(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bias: torch.Tensor | None,
    bits: int, plan: PackedPlan | None, form: Form = "product",
) -> Formed:  # fmt: skip
    size, per = weight.shape[1] * 8 // bits, 16 // bits
    _check(x, size, bias)
    group = group_size(size, scale)
    weight, scale = adjacent(weight), adjacent(scale)
    if zero is not None and zero.stride() != scale.stride():
        scale, zero = scale.contiguous(), zero.contiguous()  # kernels read both at the same places
    call = _few(x, weight, bits, bias, form)
    if call is not None and (group % GROUP_COLUMNS == 0 or group == size):
        return _launch(
            group_kernel, call, f"int{bits}", bits, (scale, zero), (scale.stride(0),), x.shape, plan,
            FLOATS=False, SCALE_ROWS=1, SCALE_WORDS=_ALL if group == size else group // per,
        )  # fmt: skip
    if call is not None and group in (16, 32, 64):
        strides = scale.stride(0), 0, scale.stride(0)
        return _launch(
            part_kernel, call, f"int{bits}", bits, (scale, None, None, None, zero, None), strides, x.shape,
            plan, ZERO=2 ** (bits - 1), PART_WORDS=group // per, BLOCK_PARTS=1,
        )  # fmt: skip
    z = 2 ** (bits - 1) if zero is None else zero
    w = dequantised(weight, size, x.dtype, scale, bits=bits, zero=z, d_columns=group, part=group)
    return F.linear(x, w, bias), form == "product"


def _linear_gguf(
    x: torch.Tensor, weight: torch.Tensor, kind: str, bias: torch.Tensor | None, plan: PackedPlan | None,
    form: Form = "product",
) -> Formed:  # fmt: skip
    size = x.shape[-1]
    _check(x, size, bias)
    of, planes = check_gguf(weight, kind, size)
    weight = adjacent(weight)
    if not planes:
        return F.linear(x, dequantise_gguf(weight, kind, size).to(x.dtype), bias), form == "product"
    parts = planes_of(of, weight, size)
    codes, high, d, m, sc, mn = parts
    call = _few(x, codes, of.bits, bias, form)
    high = None if high is None or call is None else high.view(torch.int16)
    if call is not None:
        per = 16 // of.bits
        strides = d.stride(0), 0 if sc is None else sc.stride(0), 0
        return _launch(
            part_kernel, call, of.name, of.bits, (d, m, sc, mn, None, high), strides, x.shape, plan,
            ZERO=of.zero, PART_WORDS=of.part // per, BLOCK_PARTS=1 if sc is None else of.block_size // of.part,
        )  # fmt: skip
    return F.linear(x, dequantised_gguf(of, parts, size, x.dtype), bias), form == "product"


# ---- the ops. plan: in place of the one that is made or was measured.


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None,
    plan: PackedPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_fp8`."""
    return _linear_fp8(x, weight, scale, bias, plan)[0]


def linear_int4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, plan: PackedPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_int4`."""
    return _linear_int(x, weight, scale, zero, bias, 4, plan)[0]


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, plan: PackedPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_int8`."""
    return _linear_int(x, weight, scale, zero, bias, 8, plan)[0]


def linear_gguf(
    x: torch.Tensor, weight: torch.Tensor, kind: str, bias: torch.Tensor | None = None,
    below: torch.Tensor | None = None, below_kind: str | None = None, plan: PackedPlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `linear_gguf`. Blocks as stored are dequantised by the reference."""
    if below is None or below_kind is None:
        return _linear_gguf(x, weight, kind, bias, plan)[0]
    parts = (None, None) if bias is None else bias.split((weight.shape[0], below.shape[0]))
    both = (weight, kind, parts[0]), (below, below_kind, parts[1])
    return torch.cat([_linear_gguf(x, *one, plan)[0] for one in both], -1)


def packed_product(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    bias: torch.Tensor | None = None, plan: PackedPlan | None = None, form: Form = "product",
) -> Formed:  # fmt: skip
    """The product with a weight in any form of storage, as `linear_packed_add_rms_norm` has it."""
    check_storage(storage, scale)
    if scale is None:
        return _linear_gguf(x, weight, storage, bias, plan, form)
    if storage == "fp8":
        return _linear_fp8(x, weight, scale, bias, plan, form)
    return _linear_int(x, weight, scale, zero, bias, 4 if storage == "int4" else 8, plan, form)


def linear_packed_add_rms_norm(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None,
    plan: PackedPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op `linear_packed_add_rms_norm`: where programs share columns, one kernel adds their sums and norms."""
    form: Form = "sums" if norms_sums(x.device) else "product"
    y, formed = packed_product(x, storage, weight, scale, zero, bias, plan, form)
    if form == "sums" and formed:
        return sum_add_rms_norm(y, bias, residual, norm_weight, eps)
    return add_rms_norm(y, residual, norm_weight, eps, fresh=True)


def norms_sums(device: torch.device) -> bool:
    """Whether `sum_add_rms_norm` runs on a device: it has instructions for dependent launch."""
    return has_dependent_launch(device)


# `num_tokens` of the providers: with other numbers of tokens, layers call the separate ops.


def num_tokens_linear_packed_add_rms_norm(weight: torch.Tensor) -> range:
    return range(1, MAX_TOKENS + 1 if norms_sums(weight.device) else 1)
