"""gelu(x): elementwise, so its time is that of moving the bytes, and every pass over memory that is saved shows."""

import ctypes
import math

import torch
import torch.nn.functional as F

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import DTYPE_NUMBERS, Launch, Lesson, call_cuda, normal


def plain(x: torch.Tensor) -> torch.Tensor:
    """Every operation reads what the one before it wrote."""
    v = x.float()
    return (0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v)))).to(x.dtype)


def own(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def cuda(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    call_cuda(library.lab_gelu, x, x, y, ctypes.c_int64(x.numel()), DTYPE_NUMBERS[x.dtype])
    return y


def launch(x: torch.Tensor) -> Launch:
    from nanovllm.lab.gelu_triton import gelu_kernel

    y, block = torch.empty_like(x), 1024
    grid = (-(-x.numel() // block),)
    return Launch(gelu_kernel, grid, (x, y, x.numel()), y, {"BLOCK": block}, {"num_warps": 4})


LESSON = Lesson(
    name="gelu",
    formula="x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))",
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    inputs=lambda rows, dim, dtype, device, g: (normal(rows, dim, dtype=dtype, device=device, generator=g),),
    exact=lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    plain=plain,
    own=own,
    cuda=cuda,
    launch=launch,
    cost=lambda dim, size: Cost(bytes=2 * dim * dim * size, flops=9 * dim * dim),
)
