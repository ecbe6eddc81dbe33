"""Adds the sums that a split product left, then the residual, and norms the result: one program a token."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.device_math import rounded, to_dtype
from nanovllm.kernels.triton.early_start import are_constant
from nanovllm.kernels.triton.launch_arguments import adjacent, next_power_of_2, warps_for


@triton.jit(do_not_specialize=["num_tokens"])
def sum_norm_kernel(
    parts,  # [SPLITS, num_tokens, SIZE] float32
    bias,  # [SIZE], if BIAS
    residual,  # [num_tokens, SIZE]
    norm_weight,  # [SIZE]
    y,  # [num_tokens, SIZE]
    new_residual,  # [num_tokens, SIZE]
    num_tokens, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid [num_tokens]. Launched with programmatic dependent launch."""
    dtype: tl.constexpr = y.dtype.element_ty
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    live = col < SIZE
    weight = tl.load(norm_weight + col, live, other=0.0).to(tl.float32)
    if BIAS:
        total = tl.load(bias + col, live, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    gdc_wait()  # weights never change; everything below depends on earlier kernels
    before = tl.load(residual + token * SIZE + col, live, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_tokens + token) * SIZE + col, live, other=0.0)
    v = to_dtype(rounded(total, dtype) + before, dtype)
    tl.store(new_residual + token * SIZE + col, v, live)
    v = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    tl.store(y + token * SIZE + col, to_dtype(rounded(v * scale, dtype) * weight, dtype), live)


def sum_add_rms_norm(
    sums: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the total, total = residual + bias + sum of what splits left), rounded as `add_rms_norm` rounds. Both
    are [num_tokens, size].

    Args:
        sums: [splits, num_tokens, size]; or several such, of tokens one after the other, each with splits of its own.
    """
    sums = [sums] if isinstance(sums, torch.Tensor) else sums
    residual = residual.contiguous()
    norm_weight, bias = adjacent(norm_weight), adjacent(bias)
    y, new_residual = torch.empty_like(residual), torch.empty_like(residual)
    size = residual.shape[-1]
    block = next_power_of_2(size)
    counts = [parts.shape[1] for parts in sums]
    before_of, normed_of, total_of = (whole.view(-1, size).split(counts) for whole in (residual, y, new_residual))
    for parts, before, normed, total in zip(sums, before_of, normed_of, total_of, strict=True):
        splits, num_tokens, _ = parts.shape
        sum_norm_kernel[(num_tokens,)](
            parts, before if bias is None else bias, before, norm_weight, normed, total, num_tokens, eps,
            SIZE=size, BLOCK=block, SPLITS=splits, BIAS=bias is not None, num_warps=warps_for(block, 8),
            launch_pdl=are_constant(norm_weight, bias),
        )  # fmt: skip
    return y, new_residual
