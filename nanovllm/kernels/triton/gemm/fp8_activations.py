"""The op `linear_fp8_dynamic`, and those that begin with SiLU or with a norm.

A kernel quantises activations. PyTorch's library multiplies, or `fp8_product` what that does not take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels import ops as op
from nanovllm.kernels.ops.linear_fp8 import BLOCK, block_shape
from nanovllm.kernels.ops.linear_fp8_dynamic import (
    LARGEST,
    LEAST,
    MULTIPLE,
    columns_of_a_scale,
    fp8_dynamic_refused,
    library_refuses,
)
from nanovllm.kernels.triton.device_math import gated_product, rounded, to_dtype
from nanovllm.kernels.triton.early_start import are_constant, can_launch_early
from nanovllm.kernels.triton.gemm.fp8_product import FEW_TOKENS, fp8_product, padded_tokens, splits_pay
from nanovllm.kernels.triton.gemm.packed_plan import MAX_TOKENS, has_shared_operands
from nanovllm.kernels.triton.launch_arguments import (
    adjacent,
    cdiv,
    largest_block,
    matrix_of,
    next_power_of_2,
    num_sms,
    warps_for,
)
from nanovllm.kernels.triton.rows.move_rows import converts_to_fp8, to_fp8

LEAST_TOKENS = 17
"""For which layers quantise x."""
LIBRARY_TOKENS = 8192
"""Of a call of the library at most, where scales are of rows. With more its kernels take longer for each."""


@triton.jit
def start_in_turn(LATE: tl.constexpr):
    """Wait for the kernel in front, and let the next one start: at once, or LATE, after the wait.

    The next kernel is a product, which fetches weights at its start. LATE, it does so when the sums in front are added.
    In a chain of Qwen3-8B's products with 32 tokens on an H200 that was 3 % faster (docs/log/kernels.md).
    """
    if LATE:
        gdc_wait()
        gdc_launch_dependents()
    else:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def store_codes(
    v, codes, scales, token, group, at, live, scale_stride, SIZE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Store v [groups, GROUP] of a token, at columns `at`, and a scale for each group; ROWS: one for all."""
    largest = tl.max(tl.abs(v), 1)
    if ROWS:
        largest = tl.broadcast_to(tl.max(largest, 0)[None], [v.shape[0]])
    largest = tl.maximum(largest, LEAST)
    top = tl.full([v.shape[0]], LARGEST, tl.float32)
    scale = tl.div_rn(largest, top)
    v *= tl.div_rn(top, largest)[:, None]
    if CONVERTS:
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = to_fp8(v)
    tl.store(codes + token * SIZE + at, code, live)
    if ROWS:
        tl.store(scales + token + group, scale, group == 0)
    else:
        tl.store(scales + token + group.to(tl.int64) * scale_stride, scale, group * GROUP < SIZE)


# Not specialised on the number of tokens: that would compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def quantise_kernel(
    x,  # [num_tokens, SIZE], rows x_stride apart; GATED: [num_tokens, 2 * SIZE], gate then up
    codes,  # uint8 [tokens, SIZE]
    scales,  # float32 [tokens, groups], column by column; ROWS: [tokens]
    num_tokens, x_stride, scale_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    LEAST: tl.constexpr, LARGEST: tl.constexpr, CONVERTS: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Grid [tokens, pieces of GROUPS groups of GROUP columns]; ROWS: a piece is a row. Both are powers of two.

    Tokens from num_tokens on are zeros. GATED: silu(gate) * up is quantised. CONVERTS: the GPU has an instruction that
    rounds to e4m3.
    """
    if PDL:
        start_in_turn(LATE)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = at < SIZE
    there = at < tl.where(token < num_tokens, SIZE, 0)
    x += token * x_stride
    v = tl.load(x + at, there, other=0.0).to(tl.float32)
    if GATED:
        dtype: tl.constexpr = x.dtype.element_ty
        up = tl.load(x + SIZE + at, there, other=0.0).to(tl.float32)
        v = rounded(gated_product(v, up, "silu", dtype), dtype)
    store_codes(v, codes, scales, token, group, at, live, scale_stride, SIZE, GROUP, ROWS, LEAST, LARGEST, CONVERTS)


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def normed_quantise_kernel(
    x,  # [num_tokens, SIZE], rows x_stride apart
    residual,  # like x
    norm_weight,  # [SIZE]
    total,  # [num_tokens, SIZE]: x + residual
    codes, scales,  # as of `quantise_kernel`
    num_tokens, x_stride, residual_stride, scale_stride, eps,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr,
    LARGEST: tl.constexpr, CONVERTS: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Grid [tokens]: norm(x + residual), quantised."""
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = at < SIZE
    there = at < tl.where(token < num_tokens, SIZE, 0)
    w = tl.load(norm_weight + at, live, other=0.0).to(tl.float32)
    if PDL:
        start_in_turn(LATE)
    v = tl.load(x + token * x_stride + at, there, other=0.0).to(tl.float32)
    v = rounded(v + tl.load(residual + token * residual_stride + at, there, other=0.0).to(tl.float32), dtype)
    tl.store(total + token * SIZE + at, to_dtype(v, dtype), there)
    factor = tl.rsqrt(tl.sum(tl.sum(v * v, 1), 0) / SIZE + eps)
    v = rounded(rounded(v * factor, dtype) * w, dtype)
    store_codes(v, codes, scales, token, group, at, live, scale_stride, SIZE, GROUP, ROWS, LEAST, LARGEST, CONVERTS)


def num_tokens_linear_fp8_dynamic(weight: torch.Tensor) -> range:
    """For how many tokens x is quantised, where there are fp8 tensor cores: for more than `linear_fp8` is fast with.

    Its kernel turns each weight into 16 bits and reads it at the speed of memory for up to 16 tokens or so. On an H200
    the four products of a layer of Qwen3-8B took 92 us there with 32 tokens, and 75 us with quantised activations, at
    128 tokens 195 and 87 us (docs/log/kernels.md). Of other kinds of GPUs nothing is known: there it is used where
    `linear_fp8` would expand the weight.
    """
    if not converts_to_fp8(weight.device):
        return range(0)
    major = torch.cuda.get_device_capability(weight.device)[0]
    return range(LEAST_TOKENS if has_shared_operands(major) else MAX_TOKENS + 1, 1 << 31)


num_tokens_silu_and_mul_linear_fp8_dynamic = num_tokens_linear_fp8_dynamic
num_tokens_add_rms_norm_linear_fp8_dynamic = num_tokens_linear_fp8_dynamic


def quantised(x: torch.Tensor, columns: int, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] as (float8_e4m3fn [tokens, size], float32 scales [tokens, size / columns]).

    tokens: `padded_tokens`; the further ones are zeros. Scales lie column by column.

    Args:
        columns: that share a scale: 128, or all, at most 32,768.
        gated: x is [num_tokens, 2 * size], and silu(gate) * up of its halves is quantised.
    """
    x, num_tokens, stride = matrix_of(x)
    codes, scales, group, groups = _places(num_tokens, x.shape[-1] // (1 + gated), columns, x.device)
    tokens, size = codes.shape
    pieces = 1
    if columns != size:  # no idle groups at the end of a row, if its size allows
        groups = min(groups, largest_block(cdiv(size, group), 32, 8) or 32)
        pieces = cdiv(size, groups * group)
    if tokens:
        pdl = _few(x, tokens)
        quantise_kernel[(tokens, pieces)](
            x, codes, scales, num_tokens, stride, scales.stride(1), size, groups, group, columns == size, gated, LEAST,
            LARGEST, converts_to_fp8(x.device), pdl, tokens <= FEW_TOKENS, num_warps=warps_for(groups * group, 16),
            launch_pdl=pdl,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def normed_and_quantised(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """norm(x + residual) as `quantised` has it, and x + residual [num_tokens, size], rounded as `add_rms_norm` rounds.

    Args:
        x, residual: [num_tokens, size]; norm_weight: [size]; one dtype.
        columns: as of `quantised`; size is at most 32,768.
    """
    x, num_tokens, stride = matrix_of(x)
    residual, _, residual_stride = matrix_of(residual)
    norm_weight = adjacent(norm_weight)
    codes, scales, group, groups = _places(num_tokens, x.shape[-1], columns, x.device)
    tokens, size = codes.shape
    total = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if tokens:
        pdl = _few(x, tokens) and are_constant(norm_weight)
        normed_quantise_kernel[(tokens,)](
            x, residual, norm_weight, total, codes, scales, num_tokens, stride, residual_stride, scales.stride(1), eps,
            size, groups, group, columns == size, LEAST, LARGEST, converts_to_fp8(x.device), pdl, tokens <= FEW_TOKENS,
            num_warps=warps_for(groups * group, 16), launch_pdl=pdl,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales, total


def _few(x: torch.Tensor, tokens: int) -> bool:
    """Whether a kernel that quantises is launched early and lets the product behind it start, which fetches weights."""
    return tokens <= MAX_TOKENS and can_launch_early(x)


def _places(
    num_tokens: int, size: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(codes uint8 [tokens, size], their scales, columns and number of the groups of a kernel's tile), without values.

    tokens: `padded_tokens`.
    """
    tokens = padded_tokens(num_tokens, columns < size)
    codes = torch.empty((tokens, size), dtype=torch.uint8, device=device)
    scales = torch.empty((cdiv(size, columns), tokens), dtype=torch.float32, device=device).t()
    group = min(BLOCK, next_power_of_2(size))
    return codes, scales, group, next_power_of_2(cdiv(size, group))


def scales_of_weight(scale: torch.Tensor, outputs: int) -> torch.Tensor:
    """The scales of a weight as the library reads them: of blocks [columns / 128, outputs / 128], else [1, outputs]."""
    return scale.t() if scale.shape[1] > 1 else scale.expand(outputs, 1).reshape(1, outputs).contiguous()


def library_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype,
    most: int = LIBRARY_TOKENS,
) -> torch.Tensor:  # fmt: skip
    """`torch._scaled_mm` of all tokens of codes, with operands that `library_refuses` lets pass: [tokens, outputs].

    Args:
        most: tokens of a call at most, where scales are of rows; other operands have one call.

    On Hopper and with scales of rows, sums stay in the tensor cores for all columns (`use_fast_accum`). How exact and
    how fast that is: docs/kernels.md.
    """
    of_weight = scales_of_weight(scale, len(weight))
    if scales.shape[1] > 1:
        return torch._scaled_mm(codes, weight.t(), scales, of_weight, out_dtype=dtype)
    scales = scales.flatten()[:, None]  # some versions ask for a stride of 1 between columns, of which there is one
    fast = codes.is_cuda and torch.cuda.get_device_capability(codes.device) == (9, 0)
    if len(codes) <= most:
        return torch._scaled_mm(codes, weight.t(), scales, of_weight, out_dtype=dtype, use_fast_accum=fast)
    pieces = cdiv(len(codes), most)
    step = cdiv(len(codes), pieces * MULTIPLE) * MULTIPLE
    y = torch.empty((len(codes), len(weight)), dtype=dtype, device=codes.device)
    for x, of_x, out in zip(codes.split(step), scales.split(step), y.split(step), strict=True):
        torch._scaled_mm(x, weight.t(), of_x, of_weight, out_dtype=dtype, use_fast_accum=fast, out=out)
    return y


def linear_fp8_dynamic(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The op `linear_fp8_dynamic`, by the reference where `fp8_dynamic_refused` says so."""
    _check(x, weight, scale, False)
    if fp8_dynamic_refused(x, weight, scale, bias) is not None:
        return op.linear_fp8_dynamic.native(x, weight, scale, bias)
    codes, scales = quantised(x, columns_of_a_scale(weight.shape[1], scale))
    return _product(x, codes, scales, weight, scale, bias)


def silu_and_mul_linear_fp8_dynamic(
    gate_up: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The op `silu_and_mul_linear_fp8_dynamic`, by the reference where `fp8_dynamic_refused` says so."""
    _check(gate_up, weight, scale, True)
    if fp8_dynamic_refused(gate_up, weight, scale, bias) is not None:
        return op.silu_and_mul_linear_fp8_dynamic.native(gate_up, weight, scale, bias)
    codes, scales = quantised(gate_up, columns_of_a_scale(weight.shape[1], scale), True)
    return _product(gate_up, codes, scales, weight, scale, bias)


def add_rms_norm_linear_fp8_dynamic(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor,
    scale: torch.Tensor, bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op `add_rms_norm_linear_fp8_dynamic`, by the reference where `fp8_dynamic_refused` says so."""
    _check(x, weight, scale, False)
    if fp8_dynamic_refused(x, weight, scale, bias) is not None:
        return op.add_rms_norm_linear_fp8_dynamic.native(x, residual, norm_weight, eps, weight, scale, bias)
    columns = columns_of_a_scale(weight.shape[1], scale)
    codes, scales, total = normed_and_quantised(x, residual, norm_weight, eps, columns)
    return _product(x, codes, scales, weight, scale, bias), total.view(x.shape)


def _check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, gated: bool) -> None:
    """Raise ValueError unless the shapes fit. Layers do not check them."""
    size = weight.shape[1]
    if x.shape[-1] != size * (1 + gated):
        wanted = f"{2 * size}], twice the columns of the weight" if gated else f"{size}], as the weight has"
        raise ValueError(f"{'gate_up' if gated else 'x'}: expected [..., {wanted}, not {list(x.shape)}")
    block_shape(weight, scale)
    columns_of_a_scale(size, scale)


def _own(x: torch.Tensor, num_tokens: int, outputs: int) -> bool:
    """Whether `fp8_product` multiplies even what the library takes."""
    if not x.is_cuda:
        return True
    major = torch.cuda.get_device_capability(x.device)[0]
    return has_shared_operands(major) and splits_pay(num_tokens, outputs, num_sms(x))


def _product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """x: what codes and scales were made of, for the number of tokens, the dtype and the shape of the result."""
    outputs, num_tokens = len(weight), x.numel() // x.shape[-1]
    if not _own(x, num_tokens, outputs) and library_refuses(x, weight, scale) is None:
        y = library_product(codes, scales, weight, scale, x.dtype)[:num_tokens]
        y = y if bias is None else y + bias
    else:
        y = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
        fp8_product(codes, scales, weight, scale, bias, y)
    return y.view(*x.shape[:-1], outputs)
