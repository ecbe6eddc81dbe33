"""a @ b: the one function here that computation can bound, if every number that is fetched is used often enough."""

import torch

from nanovllm.kernels import Cost
from nanovllm.lab.lesson import Inputs, Launch, Lesson, normal


def inputs(rows: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    a, b = (normal(n, dim, dtype=torch.float32, device=device, generator=generator) for n in (rows, dim))
    return a.to(dtype), (b * dim**-0.5).to(dtype)  # results of the size of the inputs


def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A sum of outer products, each of which reads and writes the whole result."""
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    a, b, dtype = a.float(), b.float(), a.dtype
    for k in range(b.shape[0]):
        c += a[:, k, None] * b[k]
    return c.to(dtype)


def own(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def launch(a: torch.Tensor, b: torch.Tensor) -> Launch:
    from nanovllm.lab.matmul_triton import matmul_kernel

    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    # Small results would leave most multiprocessors without a tile of 128 x 256.
    large = m * n >= 2048 * 2048
    bm, bn, bk, warps, stages = (128, 256, 64, 8, 3) if large else (64, 64, 64, 4, 4)
    constants = {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}
    grid = (-(-m // bm) * -(-n // bn),)
    return Launch(matmul_kernel, grid, (a, b, c, m, n, k), c, constants, {"num_warps": warps, "num_stages": stages})


LESSON = Lesson(
    name="matmul",
    formula="a @ b, summed in float32",
    dtypes=(torch.float16, torch.bfloat16),
    inputs=inputs,
    exact=torch.matmul,
    plain=plain,
    own=own,
    launch=launch,
    cuda_arguments=lambda a, b, c: (a, b, c, *c.shape, a.shape[1]),
    cost=lambda dim, size: Cost(bytes=3 * dim * dim * size, flops=2 * dim**3),
    compiled=own,  # torch.compile would unroll the loop of `plain`
    plain_limit=(1024, "a kernel launch and a pass over the result for each of dim outer products"),
    interpreted_limit=160,
)
