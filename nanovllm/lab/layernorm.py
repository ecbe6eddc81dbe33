"""LayerNorm over rows: two reductions that depend on each other, and two small operands that stay in the cache."""

import ctypes

import torch
import torch.nn.functional as F

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import Inputs, Launch, Lesson, normal

EPS = 1e-5


def inputs(rows: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shapes = (rows, dim), (dim,), (dim,)
    x, weight, bias = (normal(*s, dtype=dtype, device=device, generator=generator) for s in shapes)
    return x + 2, weight, bias  # a mean that is not 0, as real activations have


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    v = x.float()
    centred = v - v.mean(1, keepdim=True)
    variance = (centred * centred).mean(1, keepdim=True)
    return (centred * torch.rsqrt(variance + EPS) * weight.float() + bias.float()).to(x.dtype)


def own(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[1],), weight, bias, EPS)


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
    inputs=inputs,
    exact=own,
    plain=plain,
    own=own,
    launch=launch,
    cuda_arguments=lambda x, weight, bias, y: (x, weight, bias, y, *x.shape, ctypes.c_float(EPS)),
    cost=lambda dim, size: Cost(bytes=(2 * dim * dim + 2 * dim) * size, flops=8 * dim * dim),
)
