"""A linear layer of 8-bit floats whose activations are rounded to 8 bits as well, as its checkpoint was made for."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, product_cost
from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.add_rms_norm_linear import after_norm_cost
from nanovllm.kernels.ops.linear_fp8 import BLOCK, WEIGHT_ARGUMENTS, block_shape, dequantise_fp8, fp8_inputs, needs
from nanovllm.kernels.ops.norm import add_rms_norm, norm_inputs

LARGEST = 448.0
"""Of float8_e4m3fn."""
LEAST = 1e-30
"""What the largest of a group counts as at least, so that groups of zeros have a scale."""


def quantise_fp8(x: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., size] as (float8_e4m3fn [..., size], float32 scales [..., size / columns]), about code * scale.

    A scale is the largest magnitude of `columns` adjacent numbers over 448. Numbers are multiplied by its inverse, 448
    over that magnitude. Computed in float32, rounded to nearest.
    """
    groups = x.float().unflatten(-1, (-1, columns))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    top = torch.full_like(largest, LARGEST)  # PyTorch multiplies by the inverse of a number, and so rounds twice
    codes = (groups * (top / largest)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(-2), (largest / top).squeeze(-1)


MOST_COLUMNS = 32768
"""A kernel quantises a row as one tile."""
MULTIPLE = 16
"""Of tokens, outputs and columns, as the library multiplies them."""
LEAST_CUDA = (12, 9)
"""From which on cuBLASLt takes scales of blocks."""


def columns_of_a_scale(size: int, scale: torch.Tensor) -> int:
    """Columns of x that share a scale: as many as in the weight.

    Raises:
        ValueError: the weight has scales for blocks of columns that do not divide the columns.
    """
    if scale.shape[1] == 1:
        return size
    if size % BLOCK:
        raise ValueError(f"x: expected a multiple of {BLOCK} columns, since scales are of {BLOCK}, not {size}")
    return BLOCK


@op(
    arguments={"x": "[..., size]", **WEIGHT_ARGUMENTS},
    inputs=Inputs(
        fp8_inputs,
        needs=needs,
        small=[(1, 16, 128), (1, 37, 96, 1, 0), (2, 9, 33, 0, 0), (5, 144, 640), (0, 8, 128), (17, 80, 256, 1, 0),
            (3, 48, 96, 0, 0), (9, 80, 384, 1, 128)],
        # Prompts. For fewer tokens reading the weight is the cost, and activations can stay as they are.
        decode=[(512, 4096, 4096), (1024, 1024, 3072)],
        large=[(2048, 1024, 3072), (8192, 4096, 4096), (8192, 4096, 4096, 1, 0)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, weight, scale, bias=None: product_cost(x, weight.shape[0], weight, scale, bias, fp8=True),
    # Sums that stay in Hopper's tensor cores. x that is not quantised would be off by 0.026.
    tolerance={torch.bfloat16: 0.02},
)  # fmt: skip
def linear_fp8_dynamic(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_fp8` of x rounded to 8-bit floats: with a scale for each row and, like the weight, 128 or all columns.

    Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, 3.3 (blocks); vLLM's dynamic activation scheme (rows).

    Args:
        x: [..., size].
        weight: float8_e4m3fn [outputs, size].
        scale: float32, as for `linear_fp8`. With scales of 128 columns, size is a multiple of 128.
        bias: [outputs], of x's dtype, or None.

    Returns:
        [..., outputs], x's dtype, rounded once from products of 8-bit floats that are summed in float32.

    Raises:
        ValueError: the shape of scale fits no blocks that `linear_fp8` knows, or size is no multiple of 128.
    """
    block_shape(weight, scale)
    columns = columns_of_a_scale(x.shape[-1], scale)
    wide = torch.promote_types(x.dtype, torch.float32)
    codes, scales = quantise_fp8(x, columns)
    rounded = (codes.to(wide).unflatten(-1, (-1, columns)) * scales.to(wide)[..., None]).flatten(-2)
    y = F.linear(rounded, dequantise_fp8(weight, scale, wide))
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def _gated_inputs(t, tokens, outputs, size, scale_rows=BLOCK, scale_columns=BLOCK):
    made = fp8_inputs(t, tokens, outputs, size, scale_rows, scale_columns)
    return {"gate_up": t.normal(tokens, 2 * size)} | {name: made[name] for name in ("weight", "scale")}


def _gated_cost(gate_up, weight, scale, bias=None):
    outputs, size = weight.shape
    silu = 5 * gate_up.numel() // 2
    return product_cost(gate_up, outputs, weight, scale, bias, size=size, more_flops=silu, fp8=True)


@op(
    arguments={"gate_up": "[..., 2*size]", **WEIGHT_ARGUMENTS},
    inputs=Inputs(
        _gated_inputs,
        needs=needs,
        small=[(1, 16, 128), (2, 9, 33, 0, 0), (5, 144, 640), (0, 16, 128), (17, 80, 256, 1, 0)],
        decode=[(512, 4096, 12288), (1024, 1024, 3072)],  # down projections of Qwen3, for prompts
        large=[(2048, 1024, 3072), (8192, 4096, 12288)],
        scales=(1.0, 50.0),
    ),
    cost=_gated_cost,
    cancels=True,
    # What is rounded another way can take the next code, an eighth away.
    tolerance=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.125),
    fuses=("silu_and_mul", "linear_fp8_dynamic"),
)  # fmt: skip
def silu_and_mul_linear_fp8_dynamic(
    gate_up: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_fp8_dynamic` of silu(gate) * up: a gated MLP from its activation on.

    Args:
        gate_up: [..., 2 * size], the gate, then the up projection.
        weight, scale, bias: as of `linear_fp8_dynamic`.

    Returns:
        [..., outputs], gate_up's dtype. SiLU and its product are rounded to it before they are quantised.

    Raises:
        ValueError: as `linear_fp8_dynamic`.
    """
    return linear_fp8_dynamic.native(silu_and_mul.native(gate_up), weight, scale, bias)


def _normed_inputs(t, tokens, outputs, size, scale_rows=BLOCK, scale_columns=BLOCK):
    made = fp8_inputs(t, tokens, outputs, size, scale_rows, scale_columns)
    return {**made, **norm_inputs(t, tokens, size)}


@op(
    arguments={"x": "[..., size]", "residual": "[..., size]", "norm_weight": "[size]", **WEIGHT_ARGUMENTS},
    inputs=Inputs(
        _normed_inputs,
        needs=needs,
        small=[(1, 16, 128), (2, 9, 33, 0, 0), (5, 144, 640), (0, 16, 128), (17, 80, 256, 1, 0)],
        decode=[(512, 24576, 4096), (1024, 4096, 1024)],  # what Qwen3's norms precede, for prompts
        large=[(2048, 4096, 1024), (8192, 6144, 4096)],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, residual, norm_weight, eps, weight, scale, bias=None: after_norm_cost(
        x, residual, norm_weight, weight, scale, bias, fp8=True
    ),
    cancels=True,
    # What is rounded another way can take the next code, an eighth away.
    tolerance=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.125),
    fuses=("add_rms_norm", "linear_fp8_dynamic"),
)  # fmt: skip
def add_rms_norm_linear_fp8_dynamic(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_fp8_dynamic` of rms_norm(residual + x), and residual + x: from one sublayer to the next one's projection.

    Args:
        x, residual, norm_weight, eps: as of `add_rms_norm`.
        weight, scale, bias: as of `linear_fp8_dynamic`.

    Returns:
        (y [..., outputs], new residual [..., size]), x's dtype. The norm is rounded to it before it is quantised.

    Raises:
        ValueError: as `linear_fp8_dynamic`.
    """
    y, residual = add_rms_norm.native(x, residual, norm_weight, eps)
    return linear_fp8_dynamic.native(y, weight, scale, bias), residual


def fp8_dynamic_refused(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> str | None:
    """Why the provider `triton` does not take a call; None: the library or a kernel of its own multiplies."""
    outputs, size = weight.shape
    if size > MOST_COLUMNS:
        return f"rows of {size} elements; it takes at most {MOST_COLUMNS}"
    if outputs % MULTIPLE or size % MULTIPLE or not weight.is_contiguous() or x.numel() == 0:
        return f"a weight {list(weight.shape)}; it takes contiguous ones of multiples of {MULTIPLE}, and a token"
    if weight.storage_offset() % MULTIPLE:
        return f"a weight {weight.storage_offset()} bytes into its memory; it takes multiples of {MULTIPLE}"
    if scale.shape[1] > 1 and size % BLOCK:
        return f"{size} columns with scales of {BLOCK}; it takes multiples"
    if not x.is_cuda:
        return None  # the interpreter quantises, and multiplies
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 9):
        return f"fp8 tensor cores need compute capability 8.9, not {capability[0]}.{capability[1]}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x of {x.dtype}; it takes bfloat16 and float16"
    return library_refuses(x, weight, scale) if capability < (9, 0) else None


def library_refuses(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> str | None:
    """Why `torch._scaled_mm` does not multiply a call that `fp8_dynamic_refused` lets pass; None: it does.

    Source: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp; cuBLAS, "Scaling factors layouts".
    """
    (outputs, size), capability = weight.shape, torch.cuda.get_device_capability(x.device)
    if x.dtype != torch.bfloat16:
        return f"x of {x.dtype}; CUTLASS gives bfloat16"
    if scale.shape[1] == 1:
        by_row = scale.shape[0] in (1, outputs)
        return None if by_row else "scales of rows of blocks; it takes those of rows"
    if capability != (9, 0):
        return f"scales of blocks of columns need compute capability 9.0, not {capability[0]}.{capability[1]}"
    if _cuda_version() < LEAST_CUDA:
        return f"scales of blocks of columns need CUDA {LEAST_CUDA[0]}.{LEAST_CUDA[1]}, not {torch.version.cuda}"
    if scale.shape[0] != -(-outputs // BLOCK) or outputs % BLOCK or size % (4 * BLOCK) or not scale.is_contiguous():
        return f"a weight {list(weight.shape)} with scales {list(scale.shape)}; it takes whole blocks"
    return None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(n) for n in (torch.version.cuda or "0").split("."))
