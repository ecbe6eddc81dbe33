"""The kernel that gathers columns of all ranks, between real processes that share memory, in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("its processes share the memory of a CPU", allow_module_level=True)

from nanovllm.kernels import all_gather_last
from nanovllm.kernels.triton.collectives import all_gather_last as kernels
from tests.distributed.spmd import Pool

pytestmark = [pytest.mark.triton, pytest.mark.slow]
FORMS = ["contiguous", "row stride", "column stride"]
"""Of what takes a result; None: nothing is given."""


@pytest.fixture(scope="module")
def pool():
    pool = Pool(3)
    yield pool
    pool.close()


def columns(rank, call, rows, n, dtype):
    """What a rank has in a call, with a row stride; some values are 0, -0, infinite or NaN."""
    x = torch.randn(rows, n + 3, generator=torch.Generator().manual_seed(10 * call + rank))
    x = x.mul(x.abs() > 0.3)
    for i, value in enumerate((-0.0, torch.inf, -torch.inf, torch.nan)):
        x.view(-1)[(7 * call + i) :: 31] = value
    return x.to(dtype)[:, :n]


def taking(form, rows, length, dtype):
    """(A tensor of that form, what it lies in.)"""
    if form == "column stride":
        around = torch.full((length, rows), 7.0, dtype=dtype)
        return around.T, around
    around = torch.full((rows, length + 5 * (form == "row stride")), 7.0, dtype=dtype)
    return around[:, :length], around


def gathered(group, fn, dtype, n, length, sizes):
    """The results of several calls, as integers of the bits; every form of `out` is in turn."""
    results = []
    fn = kernels.all_gather_last if fn == "triton" else all_gather_last.native
    for call, rows in enumerate(sizes):
        x = columns(group.rank, call, rows, n, dtype)
        form = [None, *FORMS][call % 4]
        if form is None:
            got = fn(x, length, group)
        else:
            out, around = taking(form, rows, length, dtype)
            got = fn(x, length, group, out)
            assert got is out
            if form == "row stride":
                assert (around[:, length:] == 7).all(), "it wrote beyond the columns of the result"
        assert got.dtype == dtype and got.shape == (rows, length)
        bits = got.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16)
        results.append(bits.tolist())
    return results


def wanted(fn, dtype, n, length, size, call, rows):
    want = torch.cat([columns(rank, call, rows, n, dtype) for rank in range(size)], -1)[:, :length]
    if fn == "triton":
        want = torch.where(want == 0, 0.0, want).to(dtype)  # never -0
    return want.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16).tolist()


@pytest.mark.parametrize(
    "dtype, size, n, padding",
    [
        (torch.float32, 2, 40, 0),
        (torch.bfloat16, 2, 2056, 3),
        (torch.bfloat16, 3, 37, 2),
        (torch.float16, 2, 4099, 1),  # two blocks of columns
        (torch.float32, 3, 2049, 2051),  # nothing of the last rank, and part of the one before
    ],
)
@pytest.mark.parametrize("fn", ["triton", "native"])
def test_columns_of_many_calls(pool, fn, dtype, size, n, padding):
    # More calls than there are turns, of more and fewer rows.
    sizes, length = [3, 1, 5, 2, 1, 4, 4, 0, 5], size * n - padding
    got = pool.run(size, gathered, fn, dtype, n, length, sizes)
    for call, rows in enumerate(sizes):
        assert got[call] == wanted(fn, dtype, n, length, size, call, rows), call


def alternately(group):
    """Whether -0 of each call is still there: torch.distributed sends it, the kernel does not."""
    kept = []
    for rows in (2, 300, 3, 300, 2):
        x = torch.full((rows, 8), 1.0 + group.rank).mul(torch.tensor([-0.0] * 4 + [1] * 4))
        got = kernels.all_gather_last(x, 16, group)
        assert got[:, [7, 15]].unique(dim=0).tolist() == [[1.0, 2.0]]
        kept.append(got.signbit().any().item())
    return kept


def test_many_rows_are_gathered_by_torch_distributed(pool):
    assert pool.run(2, alternately) == [False, True, False, True, False]


def test_one_rank():
    from nanovllm.distributed.group import SINGLE

    x, out = torch.randn(3, 8), torch.empty(3, 5)
    assert torch.equal(kernels.all_gather_last(x, 5, SINGLE), x[:, :5])
    assert kernels.all_gather_last(x, 5, SINGLE, out) is out and torch.equal(out, x[:, :5])
