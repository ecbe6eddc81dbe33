"""The product of two matrices of 8-bit floats with scales, for many tokens: fp8 tensor cores and float32 sums.

Tensor cores of Hopper keep about 14 bits of a sum of 8-bit products. So a sum runs over 128 columns there, is
multiplied by the scales of these columns, and is added in float32. Source: DeepSeek-AI, "DeepSeek-V3 technical
report", 2024, 3.3.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.ops.linear_fp8 import BLOCK
from nanovllm.kernels.triton.device_math import INTERPRETED, to_dtype
from nanovllm.kernels.triton.gemm.packed_decode import fp8_to_float32
from nanovllm.kernels.triton.gemm.tiles import tile_position
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, num_sms

ALL = 1 << 30
"""Outputs that share a scale, where all do."""


@dataclass(frozen=True)
class Fp8Plan:
    """How a product is cut into tiles, and what a program takes of a multiprocessor.

    Attributes:
        tokens, outputs: of a tile.
        programs: of a multiprocessor at a time.
        group: rows of tiles that run at the same time, which share operands in the L2 cache.
    """

    tokens: int = 128
    outputs: int = 128
    warps: int = 8
    stages: int = 4
    programs: int = 1
    group: int = 16


@functools.cache
def plan_fp8_product(device: torch.device) -> Fp8Plan:
    """The built-in plan, chosen by registers and shared memory: compute capability 12 has 99 KiB. Not measured."""
    small = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12
    return Fp8Plan(tokens=64, warps=4, stages=3) if small else Fp8Plan()


if INTERPRETED:
    # The interpreter takes subnormal numbers of 8 bits for larger ones.
    @triton.jit
    def dot_fp8(a, b):
        a = fp8_to_float32(a.to(tl.int8, bitcast=True).to(tl.int32))
        return tl.dot(a, fp8_to_float32(b.to(tl.int8, bitcast=True).to(tl.int32)), input_precision="ieee")
else:

    @triton.jit
    def dot_fp8(a, b):
        """float32 a @ b of e4m3, summed with the precision of the tensor cores."""
        return tl.dot(a, b)


@triton.jit
def output_scales(scale, first, outputs, stride, SCALE_ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The scales of OUTPUTS outputs from `first` on, which broadcast to [tokens, OUTPUTS]."""
    if SCALE_ROWS % OUTPUTS == 0:  # they share one
        return tl.load(scale + first // SCALE_ROWS * stride)
    else:
        cols = first + tl.arange(0, OUTPUTS)
        return tl.load(scale + cols // SCALE_ROWS * stride, cols < outputs, other=0.0)[None, :]


# Not specialised on the number of tokens: that would compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["num_tokens", "x_scale_stride"])
def fp8_product_kernel(
    x, weight, out,  # tensor descriptors: e4m3 [tokens, size], e4m3 [outputs, size], [num_tokens, outputs]
    x_scale,  # float32 [columns of scales, tokens], `x_scale_stride` apart
    scale,  # float32 [rows of scales, columns of scales], `scale_stride` apart
    bias,  # [outputs] or None
    num_tokens, outputs, size, x_scale_stride, scale_stride,
    SCALE_ROWS: tl.constexpr,  # outputs that share a scale
    COLUMNS: tl.constexpr,  # scales are of BLOCK columns, else of all
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid [programs], each with every programs-th tile of the output. Elements outside of a tensor are zeros."""
    tiles_m = tl.cdiv(num_tokens, TOKENS)
    tiles_n = tl.cdiv(outputs, OUTPUTS)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, col = tile_position(index, tiles_m, tiles_n, GROUP)
        row *= TOKENS
        col *= OUTPUTS
        rows = row + tl.arange(0, TOKENS)
        cols = col + tl.arange(0, OUTPUTS)
        acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
        for start in range(0, size, BLOCK):
            part = dot_fp8(x.load([row, start]), weight.load([col, start]).T)
            if COLUMNS:
                at = start // BLOCK
                x_scales = tl.load(
                    x_scale + tl.cast(at, tl.int64) * x_scale_stride + rows, rows < num_tokens, other=0.0
                )
                acc += part * (
                    x_scales[:, None] * output_scales(scale + at, col, outputs, scale_stride, SCALE_ROWS, OUTPUTS)
                )
            else:
                acc += part
        if not COLUMNS:
            x_scales = tl.load(x_scale + rows, rows < num_tokens, other=0.0)
            acc *= x_scales[:, None] * output_scales(scale, col, outputs, scale_stride, SCALE_ROWS, OUTPUTS)
        if bias is not None:
            acc += tl.load(bias + cols, cols < outputs, other=0.0).to(tl.float32)[None, :]
        out.store([row, col], to_dtype(acc, out.dtype))


def fp8_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, plan: Fp8Plan | None = None,
) -> None:  # fmt: skip
    """out [num_tokens, outputs] = the product of matrices that stand for codes * scales and weight * scale, plus bias.

    Args:
        codes: float8_e4m3fn [tokens, size], contiguous, with at least num_tokens tokens.
        scales: float32 [tokens, columns of scales], column by column.
        weight, scale: as of the op `linear_fp8`, weight contiguous, with a multiple of 16 columns.
        plan: in place of the built-in one.
    """
    plan = plan or plan_fp8_product(codes.device)
    (num_tokens, outputs), size = out.shape, codes.shape[1]
    scale = adjacent(scale)
    columns = scale.shape[1] > 1
    scale_rows = ALL if scale.shape[0] == 1 else 1 if scale.shape[0] == outputs else BLOCK
    tiles = cdiv(num_tokens, plan.tokens) * cdiv(outputs, plan.outputs)
    fp8_product_kernel[(min(tiles, plan.programs * num_sms(codes)),)](
        TensorDescriptor.from_tensor(codes, [plan.tokens, BLOCK]),
        TensorDescriptor.from_tensor(weight, [plan.outputs, BLOCK]),
        TensorDescriptor.from_tensor(out, [plan.tokens, plan.outputs]),
        scales, scale, adjacent(bias), num_tokens, outputs, size, scales.stride(1), scale.stride(0), scale_rows,
        columns, plan.tokens, plan.outputs, plan.group, BLOCK, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
