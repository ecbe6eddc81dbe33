"""softmax over rows: a reduction, where the question is how often a row is read."""

import torch

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import Launch, Lesson


def plain(x: torch.Tensor) -> torch.Tensor:
    v = x.float()
    e = torch.exp(v - v.amax(1, keepdim=True))
    return (e / e.sum(1, keepdim=True)).to(x.dtype)


def launch(x: torch.Tensor) -> Launch:
    from nanovllm.lab.softmax_triton import softmax_kernel

    rows, cols = x.shape
    y, block = torch.empty_like(x), 1 << (cols - 1).bit_length()
    warps = max(1, min(16, block // 256))
    return Launch(softmax_kernel, (rows,), (x, y, cols), y, {"BLOCK": block}, {"num_warps": warps})


LESSON = Lesson(
    name="softmax",
    formula="exp(x - max(x)) / sum(exp(x - max(x))) over each row",
    exact=lambda x: torch.softmax(x, 1),
    plain=plain,
    own=lambda x: torch.softmax(x, 1),
    launch=launch,
    cuda_arguments=lambda x, y: (x, y, *x.shape),
    cost=lambda dim, size: Cost(bytes=2 * dim * dim * size, flops=5 * dim * dim),
)
