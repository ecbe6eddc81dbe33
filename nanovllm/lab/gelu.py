"""gelu(x): elementwise, so its time is that of moving the bytes. Each pass over memory that is saved shows."""

import ctypes
import math

import torch
import torch.nn.functional as F

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import Launch, Lesson


def plain(x: torch.Tensor) -> torch.Tensor:
    """Every operation reads what the one before it wrote."""
    v = x.float()
    return (0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v)))).to(x.dtype)


def launch(x: torch.Tensor) -> Launch:
    from nanovllm.lab.gelu_triton import gelu_kernel

    y, block = torch.empty_like(x), 1024
    grid = (-(-x.numel() // block),)
    return Launch(gelu_kernel, grid, (x, y, x.numel()), y, {"BLOCK": block}, {"num_warps": 4})


LESSON = Lesson(
    name="gelu",
    formula="x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))",
    exact=lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    plain=plain,
    own=lambda x: F.gelu(x, approximate="tanh"),
    launch=launch,
    cuda_arguments=lambda x, y: (x, y, ctypes.c_int64(x.numel())),
    cost=lambda dim, size: Cost(bytes=2 * dim * dim * size, flops=9 * dim * dim),
)
