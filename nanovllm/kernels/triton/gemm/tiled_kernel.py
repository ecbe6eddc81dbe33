"""Many tokens: a tiled product, whose cost is arithmetic.

`tile_kernel` has pointers and takes any strides, alignment and GPU. For `tma_kernel` the Tensor Memory Accelerator
(Hopper and later) loads and stores tiles; it has as many programs as the GPU has multiprocessors.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.triton.device_math import activation, gated_product, to_dtype
from nanovllm.kernels.triton.gemm.product_plan import TilePlan
from nanovllm.kernels.triton.gemm.stream_kernel import finish_splits
from nanovllm.kernels.triton.gemm.tiles import (
    dot,
    finish,
    multiply_tile,
    multiply_two_tiles,
    store_sums,
    tile_position,
)
from nanovllm.kernels.triton.launch_arguments import cdiv


@triton.jit
def tile_kernel(
    x, weight, bias, out, m, n, k, k_split, stride_xm, stride_xk, stride_wn, stride_wk,
    KIND: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tiles, splits]. GATED: BLOCK_N columns of the gate and the same of the up projection."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, col = tile_position(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    split = tl.program_id(1)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + rows.to(tl.int64) * stride_xm
    w_rows = weight + cols.to(tl.int64) * stride_wn
    begin = split * k_split
    end = tl.minimum(begin + k_split, k)
    if GATED:
        up_rows = w_rows + tl.cast(n, tl.int64) * stride_wn
        gate, up = multiply_two_tiles(
            x_rows, rows < m, w_rows, up_rows, cols < n, begin, end, stride_xk, stride_wk,
            BLOCK_K, True, MASK_N, MASK_K, STAGES, PRECISION,
        )  # fmt: skip
        if SPLIT:
            acc = tl.reshape(tl.join(gate, up), [BLOCK_M, 2 * BLOCK_N])
            store_sums(acc, bias, out, rows, col * BLOCK_N, m, n, split, KIND, True, True)
        else:
            acc = activation(gate, KIND, out.dtype.element_ty) * up
            store_sums(acc, None, out, rows, col * BLOCK_N, m, n, split, "none", False, False)
    else:
        acc = multiply_tile(
            x_rows, rows < m, w_rows, cols < n, begin, end, stride_xk, stride_wk,
            BLOCK_K, True, MASK_N, MASK_K, STAGES, PRECISION,
        )  # fmt: skip
        store_sums(acc, bias, out, rows, col * BLOCK_N, m, n, split, KIND, False, SPLIT)


# Not specialised on the number of tokens: that would compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["m"])
def tma_kernel(
    x, weight, bias, out, m, n, k, k_split,
    KIND: tl.constexpr, GATED: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, FLATTEN: tl.constexpr, HALVES: tl.constexpr, ROUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [programs], each with every programs-th tile. x, weight and, without splits, out are tensor descriptors:
    elements outside of a tensor are read as zero and not written.

    GATED: the weight is [2, n, k]. One load brings rows of the gate and of the up projection, and one product
    multiplies both. With ROUND (and without splits) gate, up and activation are each rounded. HALVES: finish and store
    a wide tile in two pieces, since erf needs registers.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    for index in tl.range(tl.program_id(0), tiles * SPLITS, tl.num_programs(0), flatten=FLATTEN):
        row, col = tile_position(index % tiles, tiles_m, tiles_n, GROUP_M)
        row = row * BLOCK_M
        col = col * BLOCK_N
        split = index // tiles
        if SPLITS == 1:  # bounds that do not change, or FLATTEN has no effect
            begin = 0
            end = k
        else:
            begin = split * k_split
            end = tl.minimum(begin + k_split, k)
        if GATED:
            acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
            for start in range(begin, end, BLOCK_K):
                w = weight.load([0, col, start]).reshape(2 * BLOCK_N, BLOCK_K)
                acc = dot(x.load([row, start]), w.T, acc, "ieee")
            acc = tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1))
            if SPLITS == 1:
                gate, up = tl.split(acc)
                if ROUND:
                    y = gated_product(gate, up, KIND, out.dtype)
                else:
                    y = activation(gate, KIND, out.dtype) * up
                out.store([row, col], to_dtype(y, out.dtype))
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(begin, end, BLOCK_K):
                acc = dot(x.load([row, start]), weight.load([col, start]).T, acc, "ieee")
            if SPLITS == 1:
                if HALVES:
                    HALF: tl.constexpr = BLOCK_N // 2
                    cols = col + tl.arange(0, HALF)
                    left, right = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, HALF]), (0, 2, 1)))
                    y = finish(left, bias, cols, n, KIND, False, out.dtype)
                    out.store([row, col], to_dtype(y, out.dtype))
                    y = finish(right, bias, cols + HALF, n, KIND, False, out.dtype)
                    out.store([row, col + HALF], to_dtype(y, out.dtype))
                else:
                    y = finish(acc, bias, col + tl.arange(0, BLOCK_N), n, KIND, False, out.dtype)
                    out.store([row, col], to_dtype(y, out.dtype))
        if SPLITS > 1:
            WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
            acc = tl.reshape(acc, [BLOCK_M, WIDTH])
            store_sums(acc, bias, out, row + tl.arange(0, BLOCK_M), col, m, n, split, KIND, GATED, True)


def gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, kind: str, gated: bool,
    plan: TilePlan, precision: str, pdl: bool, programs: int, stepwise: bool = False,
) -> None:  # fmt: skip
    """out [m, n] = kind(x [m, k] @ weight^T + bias); see `products.matmul`. With plan.tma, `tma_fits` must hold.

    Args:
        pdl: launch while the kernel before still runs, and wait for it on the device.
        programs: the most that the TMA kernel has.
        stepwise: with plan.tma and without splits, round gate, up and activation, each in its turn.
    """
    m, k = x.shape
    n = out.shape[1]
    tiles = cdiv(m, plan.block_m) * cdiv(n, plan.block_n)
    split = plan.splits > 1
    # Every split but the last ends on a multiple of block_k: only the last one can need a mask.
    k_split = cdiv(cdiv(k, plan.splits), plan.block_k) * plan.block_k
    target = torch.empty((plan.splits, m, weight.shape[0]), dtype=torch.float32, device=x.device) if split else out
    if plan.tma:
        tile = [plan.block_n, plan.block_k]
        halves = kind == "gelu" and not gated and not split and plan.block_n == 256
        tma_kernel[(min(tiles * plan.splits, programs),)](
            TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k]),
            TensorDescriptor.from_tensor(weight.unflatten(0, (2, n)), [2, *tile])
            if gated
            else TensorDescriptor.from_tensor(weight, tile),
            bias,
            target if split else TensorDescriptor.from_tensor(out, [plan.block_m, plan.block_n // (1 + halves)]),
            m, n, k, k_split, kind, gated, plan.splits, plan.block_m, plan.block_n, plan.block_k, plan.group_m,
            plan.flatten, halves, stepwise, pdl, num_warps=plan.warps, num_stages=plan.stages, launch_pdl=pdl,
        )  # fmt: skip
    else:
        tile_kernel[(tiles, plan.splits)](
            x, weight, bias, target, m, n, k, k_split, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
            kind, gated, split, plan.block_m, plan.block_n, plan.block_k, plan.group_m, n % plan.block_n != 0,
            k % plan.block_k != 0, plan.stages, precision, pdl, num_warps=plan.warps, num_stages=plan.stages,
            launch_pdl=pdl,
        )  # fmt: skip
    if split:
        finish_splits(target, bias, out, kind, gated, pdl)


def tma_fits(*tensors: torch.Tensor) -> bool:
    """Whether the Tensor Memory Accelerator takes these matrices: contiguous rows, all aligned to 16 bytes."""
    return all(
        t.stride(1) == 1
        and t.stride(0) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        and t.stride(0) >= t.shape[1]
        for t in tensors
    )
