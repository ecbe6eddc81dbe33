"""The Triton kernels behind the plans: what the compiler reports of a configuration, for a GPU that need not be here.

Used to hold predictions of shared memory and registers against the compiler (`nanovllm plan ... --compile`, and in
the tests).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.kernels.triton.offline_compiler import Descriptor, Pointer, Resources, Scalar, resources
from nanovllm.plan.attention_tiles import AttentionProblem, AttentionTile
from nanovllm.plan.elementwise_tiles import ElementwiseProblem, ElementwiseTile
from nanovllm.plan.gemm_tiles import GemmProblem, GemmTile
from nanovllm.plan.reduction_tiles import ReductionProblem, ReductionTile
from nanovllm.plan.resources import cdiv, next_power_of_2, padded

_PACKED_OPS = {"int4": "linear_int4", "int8": "linear_int8", "float8": "linear_fp8"}
"""Packed weight -> the op that multiplies with it. Its kernel has other tiles than those that are planned."""
TRITON_TYPE = {"float32": "fp32", "tfloat32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _divisible(**sizes: int) -> dict[str, Scalar]:
    """As Triton specialises integer arguments: by whether 16 divides them."""
    return {name: Scalar(value % 16 == 0) for name, value in sizes.items()}


def compile_gemm(tile: GemmTile, problem: GemmProblem, device: DeviceModel) -> Resources:
    """`tma_kernel` or `tile_kernel` for row-major operands, without bias and activation.

    Raises:
        ValueError: neither of the two multiplies packed weights or float8.
    """
    from nanovllm.kernels.triton.gemm.tiled_kernel import tile_kernel, tma_kernel

    p, split = problem, tile.splits > 1
    if p.weight is not None or p.dtype not in TRITON_TYPE:
        other = f"; `nanovllm tune {_PACKED_OPS[p.weight]}` times the kernel that does" if p.weight else ""
        raise ValueError(
            f"--compile: the planned kernels, tma_kernel and tile_kernel, do not multiply {p.dtype} by "
            f"{p.weight or p.dtype}{other}"
        )
    element = TRITON_TYPE[p.dtype]
    out = Pointer("fp32" if split else element)
    k_split = cdiv(cdiv(p.k, tile.splits), tile.block_k) * tile.block_k
    tiles = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m}
    common = {"bias": None, "KIND": "none", "GATED": False, "PDL": False, **tiles}
    run = partial(resources, capability=device.capability, num_warps=tile.warps, num_stages=tile.stages)
    if tile.tma:
        loads = {
            "x": Descriptor(element, (tile.block_m, tile.block_k)),
            "weight": Descriptor(element, (tile.block_n, tile.block_k)),
            "out": out if split else Descriptor(element, (tile.block_m, tile.block_n)),
        }  # fmt: skip
        return run(
            tma_kernel,
            {**common, **loads, "m": Scalar(False), **_divisible(n=p.n, k=p.k, k_split=k_split), "SPLITS": tile.splits,
             "FLATTEN": tile.flatten, "HALVES": False, "ROUND": False},
        )  # fmt: skip
    pointers = {"x": Pointer(element), "weight": Pointer(element), "out": out}
    sizes = _divisible(m=p.m, n=p.n, k=p.k, k_split=k_split, stride_xm=p.k, stride_wn=p.k)
    modes = {
        "SPLIT": split, "MASK_N": p.n % tile.block_n != 0, "MASK_K": p.k % tile.block_k != 0, "STAGES": tile.stages,
        "PRECISION": "tf32" if p.dtype == "tfloat32" else "ieee",
    }  # fmt: skip
    return run(tile_kernel, {**common, **pointers, **sizes, "stride_xk": 1, "stride_wk": 1, **modes})


def compile_attention(
    tile: AttentionTile, problem: AttentionProblem, device: DeviceModel, block_size: int = 256
) -> Resources:
    """`prefill_kernel` over a cache in blocks of `block_size` tokens."""
    from nanovllm.kernels.triton.attention.prefill_kernel import prefill_kernel

    p, element = problem, TRITON_TYPE[problem.dtype]
    pointers = {f"{name}_ptr": Pointer(element) for name in ("out", "q", "k", "v")}
    indices = {f"{name}_ptr": Pointer("i32") for name in ("table", "starts", "lens")}
    slot = p.kv_heads * p.head_dim
    sizes = _divisible(
        q_stride_token=p.heads * p.head_dim, q_stride_head=p.head_dim, stride_block=block_size * slot, stride_slot=slot,
        stride_head=p.head_dim, table_stride=next_power_of_2(cdiv(p.context, block_size)),
    )  # fmt: skip
    # Triton takes an argument of 1 as a constant.
    counts = {"num_seqs": 1 if p.batch == 1 else Scalar(p.batch % 16 == 0)}
    constants = {
        "k_scale_ptr": None, "v_scale_ptr": None, "scale": "fp32", "SEQS_PAD": next_power_of_2(p.batch),
        "GROUP": p.group, "ROWS": tile.rows, "HEAD_DIM": p.head_dim, "DIM_PAD": padded(p.head_dim),
        "BLOCK_SIZE": block_size, "TILE": tile.tile, "SOFT_CAP": 0.0, "WINDOW": 0, "FP8": False, "K_SCALES": 0,
        "V_SCALES": 0, "STAGES": tile.stages,
    }  # fmt: skip
    arguments = {**pointers, **indices, **sizes, **counts, **constants}
    return resources(prefill_kernel, arguments, device.capability, num_warps=tile.warps, num_stages=tile.stages)


def compile_elementwise(tile: ElementwiseTile, problem: ElementwiseProblem, device: DeviceModel) -> Resources:
    """The kernel of `kernels/triton/rows` with this number of inputs: silu(x), silu(x) * y, or x * y + z.

    Raises:
        ValueError: no kernel has this number of inputs.
    """
    from nanovllm.kernels.triton.rows.activation import activate_and_mul_kernel, activation_kernel
    from nanovllm.kernels.triton.rows.elementwise import _mul_add_kernel

    p, element = problem, Pointer(TRITON_TYPE[problem.dtype])
    if p.outputs != 1 or p.inputs > 3:
        raise ValueError(
            f"inputs: nanovllm has kernels of 1 to 3 inputs and one output, not {p.inputs} and {p.outputs}"
        )
    blocks = cdiv(p.elements, tile.block)
    sizes = {**_divisible(size=p.elements), "blocks": Scalar(blocks % 16 == 0) if blocks > 1 else 1}
    constants: dict[str, Any] = {"BLOCK": tile.block}
    if p.inputs == 3:
        strides = _divisible(a_stride=p.elements, b_stride=p.elements, c_stride=p.elements)
        kernel, arguments = _mul_add_kernel, {**dict.fromkeys("abcy", element), **sizes, **strides}
        options = {"enable_fp_fusion": False}
    else:
        kernel, name = (activation_kernel, "x") if p.inputs == 1 else (activate_and_mul_kernel, "gate_up")
        stride = _divisible(stride=p.elements * p.inputs)
        arguments, options = {name: element, "y": element, **sizes, **stride}, {}
        constants["KIND"] = "silu"
    warps = {"num_warps": tile.warps, "num_stages": 3}
    return resources(kernel, {**arguments, **constants}, device.capability, **warps, **options)


def compile_reduction(tile: ReductionTile, problem: ReductionProblem, device: DeviceModel) -> Resources:
    """The kernel of `kernels/triton/rows`, on contiguous rows."""
    from nanovllm.kernels.triton.rows import norm
    from nanovllm.kernels.triton.rows.softmax import _long_softmax_kernel, _softmax_kernel

    p, element = problem, Pointer(TRITON_TYPE[problem.dtype])
    common = {"x": element, "y": element, **_divisible(size=p.size), "BLOCK": tile.block}
    rows = Scalar(p.rows % 16 == 0) if p.rows > 1 else 1
    stride = _divisible(stride=p.size)
    if tile.held > 1:
        kernel, layer = norm.norm_pieces_kernel, p.kind == "layer_norm"
        strides = {"inner": 1, **_divisible(outer_stride=p.size, inner_stride=p.size), "eps": "fp32"}
        constants = {"PIECES": tile.held, "LAYER": layer, "MANY": True, "DEPENDENT": False}
        arguments = {**common, "weight": element, "bias": element, **strides, **constants}
    elif p.kind == "softmax":
        kernel = _softmax_kernel if tile.one_pass else _long_softmax_kernel
        arguments = {**common, **stride} | ({"rows": rows, "ROWS": tile.rows} if tile.one_pass else {})
    elif p.kind == "layer_norm":
        kernel = norm._layer_norm_kernel if tile.one_pass else norm._long_layer_norm_kernel
        arguments = {**common, **stride, "weight": element, "bias": element, "eps": "fp32"}
    else:
        strides = {**_divisible(outer_stride=p.size, inner_stride=p.size), "inner": 1, "eps": "fp32", "weight": element}
        if tile.one_pass:
            kernel, arguments = norm._rms_norm_kernel, {**common, **strides, "rows": rows, "ROWS": tile.rows}
        else:
            unused = {"residual": element, "new_residual": element, **_divisible(residual_stride=p.size), "ADD": False}
            kernel, arguments = norm._long_rms_norm_kernel, {**common, **strides, **unused}
    return resources(kernel, arguments, device.capability, num_warps=tile.warps, num_stages=3)
