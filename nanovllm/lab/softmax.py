"""softmax over rows: a reduction, where the question is how often a row is read."""

import ctypes

import torch

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import DTYPE_NUMBERS, Launch, Lesson, call_cuda, normal


def plain(x: torch.Tensor) -> torch.Tensor:
    v = x.float()
    e = torch.exp(v - v.amax(1, keepdim=True))
    return (e / e.sum(1, keepdim=True)).to(x.dtype)


def own(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1)


def cuda(library: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    call_cuda(library.lab_softmax, x, x, y, *x.shape, DTYPE_NUMBERS[x.dtype])
    return y


def launch(x: torch.Tensor) -> Launch:
    from nanovllm.lab.softmax_triton import softmax_kernel

    rows, cols = x.shape
    y, block = torch.empty_like(x), 1 << (cols - 1).bit_length()
    warps = max(1, min(16, block // 256))
    return Launch(softmax_kernel, (rows,), (x, y, cols), y, {"BLOCK": block}, {"num_warps": warps})


LESSON = Lesson(
    name="softmax",
    formula="exp(x - max(x)) / sum(exp(x - max(x))) over each row",
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    inputs=lambda rows, dim, dtype, device, g: (normal(rows, dim, dtype=dtype, device=device, generator=g),),
    exact=lambda x: torch.softmax(x, 1),
    plain=plain,
    own=own,
    cuda=cuda,
    launch=launch,
    cost=lambda dim, size: Cost(bytes=2 * dim * dim * size, flops=5 * dim * dim),
)
