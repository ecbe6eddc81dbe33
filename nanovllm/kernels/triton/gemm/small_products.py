"""The products of a decoder layer as ops. For few tokens each is a kernel or two, else the ops that it fuses.

`linear_silu_and_mul` has a kernel for many tokens too. Strided vectors are copied. The library multiplies with weights
that are not contiguous.

With dependent launch a kernel reads its weights while the kernel before it may still run. So it is launched like that
only if the weights are parameters, which no kernel writes (`are_constant`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import are_constant, has_dependent_launch
from nanovllm.kernels.triton.gemm import hopper_product
from nanovllm.kernels.triton.gemm.small_product_kernels import matrix_kernel, vector_kernel
from nanovllm.kernels.triton.gemm.small_product_plan import MatrixPlan, VectorPlan, max_tokens, plan_small_product
from nanovllm.kernels.triton.gemm.sum_norm import sum_add_rms_norm
from nanovllm.kernels.triton.gemm.tiled_kernel import tma_fits
from nanovllm.kernels.triton.gemm.tiled_products import many_tokens, silu_and_mul_of_many
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv, matrix_of, next_power_of_2
from nanovllm.kernels.triton.rows.activation import silu_and_mul
from nanovllm.kernels.triton.rows.norm import add_rms_norm_out, rms_norm

Normed = tuple[torch.Tensor, torch.Tensor]
"""(result, new residual)"""


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor | None, eps: float, weight: torch.Tensor,
    bias: torch.Tensor | None, gated: bool, plan: VectorPlan | MatrixPlan,
) -> Normed:  # fmt: skip
    """One kernel. Without a residual the second result is x."""
    size = x.shape[-1]
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype, device=x.device)
    # Not in place: while one program writes the sum, others read its terms.
    new_residual = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, num_tokens, x_stride = matrix_of(x)
    others, _, residual_stride = (x, 0, 0) if residual is None else matrix_of(residual)
    norm_weight, bias = adjacent(norm_weight), adjacent(bias)
    pdl = has_dependent_launch(x.device) and are_constant(weight, norm_weight, bias)
    outputs = plan.rows // 2 if gated else plan.rows
    tensors = (
        x, others, x if norm_weight is None else norm_weight, weight, x if bias is None else bias, y, new_residual,
    )  # fmt: skip
    numbers = num_outputs, x_stride, residual_stride, eps
    constants = {
        "SIZE": size, "NORM": norm_weight is not None, "ADD": residual is not None, "GATED": gated,
        "BIAS": bias is not None, "ROWS": plan.rows, "EVEN": num_outputs % outputs == 0, "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    grid = (cdiv(num_outputs, outputs),)
    if isinstance(plan, VectorPlan):
        vector_kernel[grid](
            *tensors, *numbers, TOKENS=num_tokens, BLOCK=plan.block, LANE=16 // x.element_size(),
            num_warps=plan.warps, **constants
        )  # fmt: skip
    else:
        matrix_kernel[grid](
            *tensors, num_tokens, *numbers, TOKENS=next_power_of_2(num_tokens), SPLIT=plan.split, DEPTH=plan.depth,
            LATE=plan.late, num_warps=plan.split, **constants,
        )  # fmt: skip
    return y, new_residual


def small_plan(x: torch.Tensor, weight: torch.Tensor, gated: bool, norm: bool) -> VectorPlan | MatrixPlan | None:
    """The plan of the one kernel that computes x [..., size] times weight; None: no such kernel is used."""
    num_tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if not weight.is_contiguous():
        return None
    plan = plan_small_product(num_tokens, num_outputs, x.shape[-1], gated, x.dtype)
    if plan is None:  # before the table: layers were told these numbers of tokens
        return None
    return tunables.SMALL_PRODUCT.find(x.device, num_tokens, num_outputs, x.shape[-1], x.dtype, gated, norm) or plan


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float) -> Normed:
    if residual is None:
        return rms_norm(x, norm_weight, eps), x
    y, new_residual = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return add_rms_norm_out(x, residual, norm_weight, eps, y, new_residual)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError unless x and weight have the same size and dtype. Layers do not check that."""
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"x: expected {weight.dtype} [..., {weight.shape[1]}], as the weight has, not {x.dtype} {list(x.shape)}"
        )


def add_rms_norm_linear(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """The op `add_rms_norm_linear`."""
    _check(x, weight)
    plan = small_plan(x, weight, False, True)
    if plan is not None:
        return _launch(x, residual, norm_weight, eps, weight, bias, False, plan)
    y, residual = _add_rms_norm(x, residual, norm_weight, eps)
    return linear(y, weight, bias), residual


def add_rms_norm_gate_up(
    x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> Normed:
    """The op `add_rms_norm_gate_up`."""
    _check(x, weight)
    plan = small_plan(x, weight, True, True)
    if plan is not None:
        return _launch(x, residual, norm_weight, eps, weight, None, True, plan)
    y, residual = _add_rms_norm(x, residual, norm_weight, eps)
    return linear_silu_and_mul(y, weight), residual


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op `linear`."""
    _check(x, weight)
    if hopper_product.takes(x, weight, whole=True):
        return hopper_product.product(x, weight, bias)
    plan = small_plan(x, weight, False, False)
    if plan is not None:
        return _launch(x, None, None, 0.0, weight, bias, False, plan)[0]
    return F.linear(x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op `linear_silu_and_mul`."""
    _check(x, weight)
    if hopper_product.takes(x, weight, gated=True):
        return hopper_product.product(x, weight, gated=True)
    if x.dim() == 2 and x.dtype == weight.dtype and x.shape[0] in many_tokens(weight) and tma_fits(x):
        return silu_and_mul_of_many(x, weight)
    return silu_and_mul(linear(x, weight))


def linear_add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    bias: torch.Tensor | None = None,
) -> Normed:  # fmt: skip
    """The op `linear_add_rms_norm`."""
    _check(x, weight)
    if hopper_product.takes(x, weight):
        return sum_add_rms_norm(hopper_product.product(x, weight, split=True), bias, residual, norm_weight, eps)
    return _add_rms_norm(linear(x, weight, bias), residual, norm_weight, eps)


def _few(weight: torch.Tensor, gated: bool) -> range:
    few = max_tokens(weight.shape[0] // (2 if gated else 1), weight.shape[1], gated, weight.dtype)
    taken = hopper_product.num_tokens_taken(weight, gated)  # there a norm in another kernel is faster
    return range(1, min(1 + few, taken.start) if taken else 1 + few)


class _Either(tuple[range, ...]):
    """The numbers of several ranges."""

    def __new__(cls, *ranges: range) -> _Either:
        return super().__new__(cls, ranges)

    def __contains__(self, number: object) -> bool:
        return any(number in r for r in self)


# `num_tokens` of the providers: with other numbers of tokens, layers call the fused ops separately.


def num_tokens_add_rms_norm_linear(weight: torch.Tensor) -> range:
    return _few(weight, gated=False)


def num_tokens_add_rms_norm_gate_up(weight: torch.Tensor) -> range:
    return _few(weight, gated=True)


def num_tokens_linear(weight: torch.Tensor) -> range:
    few, many = _few(weight, False), hopper_product.num_tokens_whole(weight)
    return range(1, many.stop) if few and many else many or few


def num_tokens_linear_add_rms_norm(weight: torch.Tensor) -> range:
    return hopper_product.num_tokens_taken(weight)


def num_tokens_linear_silu_and_mul(weight: torch.Tensor) -> _Either:
    return _Either(hopper_product.num_tokens_taken(weight, gated=True), many_tokens(weight))
