"""LayerNorm over rows: two reductions that depend on each other, and two small operands that stay in the cache."""

import ctypes

import torch
import torch.nn.functional as F

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import DTYPE_NUMBERS, Inputs, Launch, Lesson, call_cuda, normal

EPS = 1e-5


def inputs(rows: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    x, weight, bias = (
        normal(*s, dtype=dtype, device=device, generator=generator) for s in ((rows, dim), (dim,), (dim,))
    )
    return x + 2, weight, bias  # a mean that is not 0, as real activations have


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    v = x.float()
    centred = v - v.mean(1, keepdim=True)
    variance = (centred * centred).mean(1, keepdim=True)
    return (centred * torch.rsqrt(variance + EPS) * weight.float() + bias.float()).to(x.dtype)


def own(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[1],), weight, bias, EPS)


def cuda(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    call_cuda(library.lab_layernorm, x, x, weight, bias, y, *x.shape, ctypes.c_float(EPS), DTYPE_NUMBERS[x.dtype])
    return y


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Launch:
    from nanovllm.lab.layernorm_triton import layernorm_kernel

    rows, cols = x.shape
    y, block = torch.empty_like(x), 1 << (cols - 1).bit_length()
    warps = max(1, min(16, block // 256))
    args = (x, weight, bias, y, cols, EPS)
    return Launch(layernorm_kernel, (rows,), args, y, {"BLOCK": block}, {"num_warps": warps})


LESSON = Lesson(
    name="layernorm",
    formula="(x - mean(x)) / sqrt(variance(x) + 1e-5) * weight + bias over each row",
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    inputs=inputs,
    exact=lambda x, weight, bias: F.layer_norm(x, (x.shape[1],), weight, bias, EPS),
    plain=plain,
    own=own,
    cuda=cuda,
    launch=launch,
    cost=lambda dim, size: Cost(bytes=(2 * dim * dim + 2 * dim) * size, flops=8 * dim * dim),
)
