"""Columns that ranks gather in tests: on processors, in Triton's interpreter, and on GPUs."""

import hashlib

import torch

from nanovllm.kernels import all_gather_last
from tests.distributed.spmd import device_of

SIZES = (3, 1, 5, 2, 1, 4, 4, 0, 5)
"""The rows of each call: more calls than the kernel has turns, of more and fewer rows."""
FORMS = ["contiguous", "row stride", "column stride"]
"""Of what takes a result; None: nothing is given."""


def columns(rank, call, rows, n, dtype, device="cpu"):
    """What a rank has in a call, with a row stride; some values are 0, -0, infinite or NaN."""
    x = torch.randn(rows, n + 3, generator=torch.Generator().manual_seed(10 * call + rank))
    x = x.mul(x.abs() > 0.3)
    for i, value in enumerate((-0.0, torch.inf, -torch.inf, torch.nan)):
        x.view(-1)[(7 * call + i) :: 31] = value
    return x.to(dtype).to(device)[:, :n]  # the CPU rounds: NaN has several bit patterns


def taking(form, rows, length, dtype, device):
    """(A tensor of that form, what it lies in.)"""
    if form == "column stride":
        around = torch.full((length, rows), 7.0, dtype=dtype, device=device)
        return around.T, around
    around = torch.full((rows, length + 5 * (form == "row stride")), 7.0, dtype=dtype, device=device)
    return around[:, :length], around


def digest(x):
    """Of the bits of x: -0 is not 0, and NaN equals NaN."""
    return hashlib.blake2b(x.contiguous().view(torch.uint8).cpu().numpy().tobytes(), digest_size=8).hexdigest()


def by_the_kernel(rows, n, dtype):
    """Whether the kernel gathers so many rows. torch.distributed gathers more, or more than 20 MiB of a rank."""
    return rows <= min(256, (20 << 20) // (-(-n // 16) * 16 * dtype.itemsize))


def gathered(group, provider, dtype, n, length, sizes=SIZES):
    """Digests of the results of several calls; every form of `out` is in turn."""
    results, fn = [], all_gather_last.native
    if provider == "triton":
        from nanovllm.kernels.triton.collectives.all_gather_last import all_gather_last as fn
    for call, rows in enumerate(sizes):
        x = columns(group.rank, call, rows, n, dtype, device_of(group.rank))
        form = [None, *FORMS][call % 4]
        if form is None:
            got = fn(x, length, group)
        else:
            out, around = taking(form, rows, length, dtype, x.device)
            got = fn(x, length, group, out)
            assert got is out
            if form == "row stride":
                assert (around[:, length:] == 7).all(), "it wrote beyond the columns of the result"
        assert got.dtype == dtype and got.shape == (rows, length)
        results.append(digest(got))
    return results


def wanted(provider, dtype, n, length, size, sizes=SIZES):
    """What `gathered` is to return."""
    results = []
    for call, rows in enumerate(sizes):
        want = torch.cat([columns(rank, call, rows, n, dtype) for rank in range(size)], -1)[:, :length]
        if provider == "triton" and by_the_kernel(rows, n, dtype):
            want = torch.where(want == 0, 0.0, want).to(dtype)  # never -0, which torch.distributed keeps
        results.append(digest(want))
    return results
