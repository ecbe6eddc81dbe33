"""The ops `linear_bias_act` and `gated_mlp`, and `linear_silu_and_mul` of many tokens."""

from __future__ import annotations

from functools import cache

import torch

from nanovllm.kernels.extra.gated_mlp import GATES
from nanovllm.kernels.extra.linear_bias_act import check_activation
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan, plan_product
from nanovllm.kernels.triton.gemm.stream_kernel import stream
from nanovllm.kernels.triton.gemm.tiled_kernel import gemm, tma_fits
from nanovllm.kernels.triton.launch_arguments import adjacent, num_sms

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MANY_TOKENS = 4096
"""From here on `silu_and_mul_of_many` has enough tiles: the last wave of programs hardly counts."""
MANY_PLAN = TilePlan(128, 128, 64, 16, 1, 8, 4, tma=True, flatten=True)
_MOST_COLUMNS = 2048
TMA_SHARED = 227 << 10
"""Bytes of shared memory that the TMA kernel takes at most. Only data-center GPUs have as much."""


@cache
def features(device: torch.device) -> tuple[bool, bool]:
    """Whether dependent launch works on a device, and whether the tiles of the TMA kernel fit there."""
    dependent = has_dependent_launch(device)
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) if dependent else 0
    return dependent, room >= TMA_SHARED


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, gated: bool,
    plan: StreamPlan | TilePlan | None = None, early: bool = False,
) -> torch.Tensor:  # fmt: skip
    """kind(x @ weight^T + bias), or if gated kind(x @ gate^T) * (x @ up^T): [m, n].

    Args:
        x: [m, k]; any strides.
        weight: [n, k], or if gated [2 n, k] with the gate first; any strides.
        plan: in place of the tuned plan, or of the one that `plan_product` makes.
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
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    if isinstance(plan, StreamPlan):
        stream(x, weight, bias, out, kind, gated, plan, precision, pdl, early)
    else:
        gemm(x, weight, bias, out, kind, gated, plan, precision, pdl, num_sms(x))
    return out


def many_tokens(weight: torch.Tensor) -> range:
    """The numbers of tokens for which `silu_and_mul_of_many` is worth it with this weight [2 * outputs, size].

    On an H200 the product is as fast as the library's at size 1024, and the activation is free (`gated_mlp`
    8192x1024x3072: 211 us instead of 242). At size 4096 the product loses more than the activation costs.
    """
    suited = weight.is_cuda and weight.dtype in (torch.float16, torch.bfloat16) and 0 < weight.shape[1] <= _MOST_COLUMNS
    return range(MANY_TOKENS, 1 << 31) if suited and features(weight.device)[1] and tma_fits(weight) else range(0)


def silu_and_mul_of_many(x: torch.Tensor, weight: torch.Tensor, plan: TilePlan = MANY_PLAN) -> torch.Tensor:
    """The op `linear_silu_and_mul` for x [num_tokens, size] that `tma_fits`, num_tokens in `many_tokens(weight)`."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    gemm(x, weight, None, out, "silu", True, plan, "ieee", features(x.device)[0], num_sms(x), stepwise=True)
    return out


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2) if x.dim() > 2 else torch.atleast_2d(x)


def linear_bias_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """The op `linear_bias_act`, rounded once. Takes any strides; may copy x of more than two dimensions."""
    check_activation(activation)
    out = matmul(_matrix(x), weight, adjacent(bias), activation, False)
    return out.view(*x.shape[:-1], weight.shape[0])


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """The op `gated_mlp` in two kernels; rounds the product of activation and up, and the result. Takes any strides."""
    check_activation(activation, GATES)
    hidden = matmul(_matrix(x), gate_up, None, activation, True)
    # Early loads of longer rows would take bandwidth from the kernel that still runs.
    return matmul(hidden, down, None, "none", False, early=hidden.shape[1] <= 4096).view(x.shape)
