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
from nanovllm.kernels.ops.linear_fp8_dynamic import MULTIPLE
from nanovllm.kernels.triton.device_math import INTERPRETED, to_dtype
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm.packed_decode import fp8_to_float32
from nanovllm.kernels.triton.gemm.packed_kernels import start_early
from nanovllm.kernels.triton.gemm.stream_kernel import finish_splits
from nanovllm.kernels.triton.gemm.tiles import tile_position
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, num_sms

LEAST_STEPS, USUAL_STEPS = 4, 8
"""Tiles of columns that a program has at least, where programs share columns: USUAL_STEPS if that leaves two programs
to each multiprocessor, else LEAST_STEPS.
"""
ALL = 1 << 30
"""Outputs that share a scale, where all do."""


@dataclass(frozen=True)
class Fp8Plan:
    """How a product is cut into tiles, and what a program takes of a multiprocessor.

    Attributes:
        tokens, outputs: of a tile.
        programs: of a multiprocessor at a time.
        group: rows of tiles that run at the same time, which share operands in the L2 cache.
        splits: programs that share the columns of a tile. A second kernel adds their sums.
        weight_first: the weight is the first operand of the tensor cores, which takes 64 rows at least; else x is. So
            a tile may have fewer than 64 tokens.
        columns: of a stage: of the operands that are in shared memory at a time. Where scales are of BLOCK columns, a
            stage has as many, and there are as many more stages.
    """

    tokens: int = 128
    outputs: int = 128
    warps: int = 8
    stages: int = 4
    programs: int = 1
    group: int = 16
    splits: int = 1
    weight_first: bool = False
    columns: int = BLOCK


FEW_TOKENS, SOME_TOKENS, MORE_TOKENS, MANY_TOKENS = 32, 64, 128, 256
"""Numbers of tokens up to which tiles are smaller than those for prompts."""


def rounded_tokens(num_tokens: int, blocks: bool) -> int:
    """Numbers of tokens that share a plan: how many kernels are compiled does not grow with a batch.

    Args:
        blocks: scales are of BLOCK columns, with which the plan for FEW_TOKENS was not timed.
    """
    steps = (FEW_TOKENS, SOME_TOKENS, MORE_TOKENS, MANY_TOKENS)[blocks:]
    return next((most for most in steps if num_tokens <= most), MANY_TOKENS + 1)


def padded_tokens(num_tokens: int, blocks: bool) -> int:
    """Tokens that x is padded to. Up to 128 they are whole tiles, since a tile that is partly outside of x is slow.

    24576 x 4096 took 34.8 us on an H200 with 32 tokens, and 29.0 with 64, by the same plan (docs/log/kernels.md).
    """
    multiple = min(SOME_TOKENS, rounded_tokens(num_tokens, blocks)) if num_tokens <= MORE_TOKENS else MULTIPLE
    return cdiv(num_tokens, multiple) * multiple


@functools.cache
def plan_fp8_product(num_tokens: int, outputs: int, size: int, multiprocessors: int, small: bool) -> Fp8Plan:
    """The built-in plan for `rounded_tokens`. Up to 128 it is the fastest of a few, on the whole, for Qwen3-8B's shapes
    on an H200 (docs/log/kernels.md). Beyond 256 it was chosen by registers and shared memory.

    Args:
        small: a program has at most 99 KiB of shared memory, as of compute capability 12.
    """
    if num_tokens > MANY_TOKENS:
        return Fp8Plan(tokens=64, warps=4, stages=3) if small else Fp8Plan()
    if num_tokens <= FEW_TOKENS and not small:
        programs, tiles, steps = 3 * multiprocessors, cdiv(outputs, 64), size // (2 * BLOCK)
        splits = max(programs // 2 // tiles, min(programs // tiles, steps // USUAL_STEPS))
        splits = max(1, min(splits, 2 * steps // LEAST_STEPS))
        return Fp8Plan(FEW_TOKENS, 64, 4, 3, 3, splits=splits, weight_first=True, columns=2 * BLOCK)
    tokens, width, stages, programs = (64, 64, 4, 3) if num_tokens <= SOME_TOKENS else (128, 64, 4, 2)
    if small:
        tokens, stages, programs = min(tokens, num_tokens), 3, 1
    tiles, steps = cdiv(num_tokens, tokens) * cdiv(outputs, width), size // BLOCK
    usual = max(steps // USUAL_STEPS, min(2 * multiprocessors // tiles, steps // LEAST_STEPS))
    splits = max(1, min(programs * multiprocessors // tiles, usual))
    return Fp8Plan(tokens, width, 4, stages, programs, splits=splits)


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
    x, weight,  # tensor descriptors: e4m3 [tokens, size], e4m3 [outputs, size]
    weight_words,  # the weight's memory, int16 [outputs, size / 2]
    # out: tensor descriptor [num_tokens, outputs]; if WEIGHT_FIRST a pointer; if SPLITS > 1 a pointer to float32
    # [SPLITS, num_tokens, outputs]
    out,
    x_scale,  # float32 [columns of scales, tokens], `x_scale_stride` apart
    scale,  # float32 [rows of scales, columns of scales], `scale_stride` apart
    bias,  # [outputs] or None; with SPLITS > 1 the second kernel adds it
    num_tokens, outputs, size, x_scale_stride, scale_stride,
    SCALE_ROWS: tl.constexpr,  # outputs that share a scale
    COLUMNS: tl.constexpr,  # scales are of BLOCK columns, else of all
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,  # as of `Fp8Plan`
    PDL: tl.constexpr, AHEAD: tl.constexpr,  # tiles of the weight that are fetched before the kernel in front has ended
):  # fmt: skip
    """Grid [programs], each with every programs-th part of the output. Elements outside of a tensor are zeros."""
    # Sums stay in the tensor cores for all columns in the order in which these leave them.
    TURNED: tl.constexpr = WEIGHT_FIRST and not COLUMNS
    tiles_m = tl.cdiv(num_tokens, TOKENS)
    tiles_n = tl.cdiv(outputs, OUTPUTS)
    steps = tl.cdiv(size, BLOCK)
    if PDL:
        split = tl.program_id(0) % SPLITS
        _, col = tile_position(tl.program_id(0) // SPLITS, tiles_m, tiles_n, GROUP)
        cols = col * OUTPUTS + tl.arange(0, OUTPUTS)
        first = split * steps // SPLITS * BLOCK // 2
        start_early(weight_words, cols, cols < outputs, first, size // 2, size // 2, AHEAD * BLOCK // 2)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLITS, tl.num_programs(0)):
        split = index % SPLITS
        row, col = tile_position(index // SPLITS, tiles_m, tiles_n, GROUP)
        row *= TOKENS
        col *= OUTPUTS
        rows = row + tl.arange(0, TOKENS)
        cols = col + tl.arange(0, OUTPUTS)
        first = split * steps // SPLITS
        last = (split + 1) * steps // SPLITS
        if TURNED:
            acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        else:
            acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
        if COLUMNS:  # scales are loaded a tile ahead
            x_scales = tl.load(x_scale + first.to(tl.int64) * x_scale_stride + rows, rows < num_tokens, other=0.0)
            scales = output_scales(scale + first, col, outputs, scale_stride, SCALE_ROWS, OUTPUTS)
        for step in range(first, last):
            if COLUMNS:
                ahead = tl.minimum(step + 1, last - 1)
                next_x = tl.load(
                    x_scale + tl.cast(ahead, tl.int64) * x_scale_stride + rows, rows < num_tokens, other=0.0
                )
                next_scales = output_scales(scale + ahead, col, outputs, scale_stride, SCALE_ROWS, OUTPUTS)
            if WEIGHT_FIRST:
                part = dot_fp8(weight.load([col, step * BLOCK]), x.load([row, step * BLOCK]).T)
            else:
                part = dot_fp8(x.load([row, step * BLOCK]), weight.load([col, step * BLOCK]).T)
            if COLUMNS:
                if WEIGHT_FIRST:
                    part = tl.trans(part)
                acc += part * (x_scales[:, None] * scales)
                x_scales = next_x
                scales = next_scales
            else:
                acc += part
        if TURNED:
            acc = tl.trans(acc)
        if not COLUMNS:
            x_scales = tl.load(x_scale + rows, rows < num_tokens, other=0.0)
            acc *= x_scales[:, None] * output_scales(scale, col, outputs, scale_stride, SCALE_ROWS, OUTPUTS)
        if SPLITS == 1 and bias is not None:
            acc += tl.load(bias + cols, cols < outputs, other=0.0).to(tl.float32)[None, :]
        if SPLITS > 1 or WEIGHT_FIRST:  # a store through a descriptor would need shared memory of its own
            at = (split * num_tokens + rows).to(tl.int64)[:, None] * outputs + cols[None, :]
            live = (rows < num_tokens)[:, None] & (cols < outputs)[None, :]
            tl.store(out + at, to_dtype(acc, out.dtype.element_ty), live)
        else:
            out.store([row, col], to_dtype(acc, out.dtype))


@functools.cache
def has_99_kib(device: torch.device) -> bool:
    """Whether a program has at most 99 KiB of shared memory there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12


def splits_pay(num_tokens: int, outputs: int, multiprocessors: int) -> bool:
    """Whether this product is faster than the library's, which lets programs share columns too rarely.

    Measured at 32, 64, 128 and 256 tokens of Qwen3-8B's shapes on an H200: all products up to 64 tokens, and up to 128
    those of so few outputs that two programs or more share the columns on each multiprocessor.
    """
    few_outputs = 2 * cdiv(outputs, 64) <= multiprocessors
    return num_tokens <= SOME_TOKENS or (num_tokens <= MORE_TOKENS and few_outputs)


def fp8_sums(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, num_tokens: int, plan: Fp8Plan,
) -> None:  # fmt: skip
    """Launch the kernel. out: as of `fp8_product`; with splits float32 [splits, num_tokens, outputs], without bias."""
    outputs, size = weight.shape
    scale = adjacent(scale)
    columns = scale.shape[1] > 1
    block = BLOCK if columns else plan.columns
    stages = plan.stages * (plan.columns // block)
    scale_rows = ALL if scale.shape[0] == 1 else 1 if scale.shape[0] == outputs else BLOCK
    tiles = cdiv(num_tokens, plan.tokens) * cdiv(outputs, plan.outputs) * plan.splits
    pdl = tiles <= plan.programs * num_sms(codes) and has_dependent_launch(codes.device)
    fp8_product_kernel[(min(tiles, plan.programs * num_sms(codes)),)](
        TensorDescriptor.from_tensor(codes, [plan.tokens, block]),
        TensorDescriptor.from_tensor(weight, [plan.outputs, block]), weight.view(torch.int16),
        out if plan.splits > 1 or plan.weight_first else TensorDescriptor.from_tensor(out, [plan.tokens, plan.outputs]),
        scales, scale, None if plan.splits > 1 else adjacent(bias), num_tokens, outputs, size, scales.stride(1),
        scale.stride(0), scale_rows, columns, plan.tokens, plan.outputs, plan.group, block, plan.splits,
        plan.weight_first, pdl, stages - 1, num_warps=plan.warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


def fp8_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, plan: Fp8Plan | None = None,
) -> None:  # fmt: skip
    """out [num_tokens, outputs] = the product of matrices that stand for codes * scales and weight * scale, plus bias.

    Args:
        out: contiguous.
        codes: float8_e4m3fn [tokens, size], contiguous, with at least num_tokens tokens.
        scales: float32 [tokens, columns of scales], column by column.
        weight, scale: as of the op `linear_fp8`, weight contiguous, with a multiple of 16 columns.
        plan: in place of the built-in one.
    """
    if plan is None:
        tokens, small = rounded_tokens(len(out), scale.shape[1] > 1), has_99_kib(codes.device)
        plan = plan_fp8_product(tokens, *weight.shape, num_sms(codes), small)
    if plan.splits == 1:
        fp8_sums(codes, scales, weight, scale, bias, out, len(out), plan)
        return
    parts = torch.empty((plan.splits, *out.shape), dtype=torch.float32, device=out.device)
    fp8_sums(codes, scales, weight, scale, None, parts, len(out), plan)
    finish_splits(parts, adjacent(bias), out, "none", False, has_dependent_launch(out.device))
