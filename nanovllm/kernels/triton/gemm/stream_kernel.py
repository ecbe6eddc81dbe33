"""Few tokens: the weight streams through the multiprocessors once, and reading it is the cost.

One token runs on the ordinary units, more on the tensor cores: the weight is the left operand, the tokens, padded to a
power of two, are the right one. If the weight has too few rows to keep all multiprocessors reading, programs share the
sum of a row (SPLIT). A second kernel adds their parts in order, so the bits are the same every time.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.device_math import to_dtype
from nanovllm.kernels.triton.gemm.product_plan import StreamPlan
from nanovllm.kernels.triton.gemm.tiles import finish, multiply_tile, multiply_vector, store_sums, weight_rows
from nanovllm.kernels.triton.launch_arguments import cdiv


@triton.jit
def stream_kernel(
    x, weight, bias, out, m, n, k, k_split, stride_xm, stride_xk, stride_wn, stride_wk,
    KIND: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid [pieces of the outputs, splits]: all tokens, some rows of the weight."""
    UNITS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first = tl.program_id(0) * UNITS
    row, live = weight_rows(first, n, ROWS, GATED)
    w_rows = weight + (tl.where(live, row, 0) if MASK_ROWS else row).to(tl.int64) * stride_wn
    begin = tl.program_id(1) * k_split
    end = tl.minimum(begin + k_split, k)
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tokens = tl.arange(0, TOKENS)
    if TOKENS == 1:
        acc = multiply_vector(
            w_rows, live, x, begin, end, stride_wk, stride_xk, BLOCK_K, MASK_ROWS, MASK_K, STAGES, EARLY
        )
        acc = acc[None, :]
    else:
        x_rows = x + tokens.to(tl.int64) * stride_xm
        acc = multiply_tile(
            w_rows, live, x_rows, tokens < m, begin, end, stride_wk, stride_xk,
            BLOCK_K, MASK_ROWS, True, MASK_K, STAGES, PRECISION,
        )  # fmt: skip
        acc = tl.trans(acc)
    store_sums(acc, bias, out, tokens, first, m, n, tl.program_id(1), KIND, GATED, SPLIT)


@triton.jit
def add_splits(
    parts, bias, out, total, n,
    SPLITS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs [total] from their parts [SPLITS, total], or if GATED [SPLITS, total, 2], added in order."""
    WIDTH: tl.constexpr = 2 * BLOCK if GATED else BLOCK
    width = 2 * total if GATED else total
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts + split * width + i, i < width, other=0.0)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + o % n, o < total, other=0.0).to(tl.float32)
    y = finish(acc[None, :], None, o, n, KIND, GATED, dtype)
    tl.store(out + o[None, :], to_dtype(y, dtype), (o < total)[None, :])


def stream(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, kind: str, gated: bool,
    plan: StreamPlan, precision: str, pdl: bool, early: bool = False,
) -> None:  # fmt: skip
    """out [m, n] = kind(x [m, k] @ weight^T + bias) for m up to plan.tokens; see `products.matmul`.

    Args:
        pdl: launch while the kernel before still runs, and wait for it on the device.
        early: with pdl and one token, load the weight before that wait. The kernel before must not write the weight,
            and must wait for its own predecessors before it lets this one start.
    """
    m, k = x.shape
    n = out.shape[1]
    split = plan.splits > 1
    k_split = cdiv(cdiv(k, plan.splits), plan.block_k) * plan.block_k
    masked = k % plan.block_k != 0  # only the last split can need a mask: the others end on a multiple of block_k
    target = torch.empty((plan.splits, m, weight.shape[0]), dtype=torch.float32, device=x.device) if split else out
    units = plan.rows // 2 if gated else plan.rows
    stream_kernel[(cdiv(n, units), plan.splits)](
        x, weight, bias, target, m, n, k, k_split, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        kind, gated, split, plan.tokens, plan.rows, plan.block_k, n % units != 0, masked, plan.stages, precision,
        pdl, early and pdl and plan.tokens == 1,
        num_warps=plan.warps, num_stages=plan.stages, launch_pdl=pdl,
    )  # fmt: skip
    if split:
        finish_splits(target, bias, out, kind, gated, pdl)


def finish_splits(
    parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, kind: str, gated: bool, pdl: bool
) -> None:
    """out [m, n] from parts [splits, m, n or 2 n], written by the kernel just launched."""
    total = out.numel()
    block = 128 if total <= 1 << 16 else 512
    add_splits[(cdiv(total, block),)](
        parts, bias, out, total, out.shape[1], parts.shape[0], kind, gated, block, pdl,
        num_warps=block // 128 * (2 if gated else 1), launch_pdl=pdl,
    )  # fmt: skip
