"""The ops `linear_bias_act` and `gated_mlp`, and `linear_silu_and_mul` of many tokens, on the kernels of this package."""

from __future__ import annotations

from functools import cache

import torch

from nanovllm.kernels.extra.gated_mlp import check_gated_mlp
from nanovllm.kernels.extra.linear_bias_act import check_linear
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm.plan import StreamPlan, TilePlan, plan_product
from nanovllm.kernels.triton.gemm.stream_kernel import stream
from nanovllm.kernels.triton.gemm.tiled_kernel import gemm, tma_fits
from nanovllm.kernels.triton.launch import adjacent, num_sms

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


MANY_TOKENS = 4096
"""From here on `silu_and_mul_of_many` has its one plan: enough tiles that the last round of programs counts little."""
_MOST_COLUMNS = 2048
_MANY_PLAN = TilePlan(128, 128, 64, 16, 1, 8, 4, tma=True, flatten=True)

# Bytes of shared memory that the tiles of the TMA kernel take at most: data-center GPUs have that, others do not.
_TMA_SHARED = 227 << 10


@cache
def _gpu_features(index: int) -> tuple[bool, bool]:
    hopper = torch.cuda.get_device_capability(index) >= (9, 0)
    return hopper, hopper and torch.cuda.get_device_properties(index).shared_memory_per_block_optin >= _TMA_SHARED


def features(device: torch.device) -> tuple[bool, bool]:
    """Whether a kernel can be launched while the one before it runs, and whether the TMA kernel's tiles have room."""
    return _gpu_features(device.index) if device.type == "cuda" else (False, False)


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, gated: bool,
    plan: StreamPlan | TilePlan | None = None, early: bool = False,
) -> torch.Tensor:  # fmt: skip
    """kind(x @ weight^T + bias), or if gated kind(x @ gate^T) * (x @ up^T): [m, n].

    Args:
        x: [m, k]; weight: [n, k], or if gated [2 n, k] with the gate first; any strides.
        plan: instead of the one that follows from the shape.
        early: see `stream`.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"x: expected float32, float16 or bfloat16, not {x.dtype}")
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    pdl, tma = features(x.device)
    if plan is None:
        tma = tma and x.dtype != torch.float32 and k > 0 and tma_fits(x, weight, out)
        row_major = weight.stride(1) == 1
        if row_major and x.element_size() == 2:
            plan = tunables.PRODUCT.find(x.device, *tunables.product_key(m, n, k, x.dtype, gated, tma))
        plan = plan or plan_product(m, n, k, x.element_size(), gated, row_major, tma, num_sms(x))
    # What PyTorch was told for its own products: torch.set_float32_matmul_precision, or torch.backends.
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    if isinstance(plan, StreamPlan):
        stream(x, weight, bias, out, kind, gated, plan, precision, pdl, early)
    else:
        gemm(x, weight, bias, out, kind, gated, plan, precision, pdl, num_sms(x))
    return out


def many_tokens(weight: torch.Tensor) -> range:
    """The numbers of tokens for which `silu_and_mul_of_many` is worth it with this weight [2 * outputs, size].

    On an H200 the product alone is as fast as the library's at size 1024, and the activation is free (`gated_mlp` 8192x1024x3072:
    211 us for 242). It is a tenth slower at size 4096, where the activation is no longer a tenth.
    """
    if (
        weight.dtype not in (torch.float16, torch.bfloat16)
        or not 0 < weight.shape[1] <= _MOST_COLUMNS
        or not weight.is_cuda
    ):
        return range(0)
    return range(MANY_TOKENS, 1 << 31) if features(weight.device)[1] and tma_fits(weight) else range(0)


def silu_and_mul_of_many(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op `linear_silu_and_mul` for many tokens: x [num_tokens, size] for which `tma_fits`, num_tokens in `many_tokens(weight)`."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    gemm(x, weight, None, out, "silu", True, _MANY_PLAN, "ieee", features(x.device)[0], num_sms(x), stepwise=True)
    return out


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2) if x.dim() > 2 else torch.atleast_2d(x)


def linear_bias_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """The op `linear_bias_act`, rounded once. Takes any strides; x of more than two dimensions is copied if it must be."""
    check_linear(x, weight, bias, activation)
    out = matmul(_matrix(x), weight, adjacent(bias), activation, False)
    return out.view(*x.shape[:-1], weight.shape[0])


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """The op `gated_mlp` in two kernels; rounds the product of activation and up, and the result. Takes any strides."""
    check_gated_mlp(x, gate_up, down, activation)
    hidden = matmul(_matrix(x), gate_up, None, activation, True)
    # Longer rows of `down` do better to wait: what is loaded early takes bandwidth from the kernel that still runs.
    return matmul(hidden, down, None, "none", False, early=hidden.shape[1] <= 4096).view(x.shape)
