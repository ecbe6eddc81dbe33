"""The kernel that gathers columns of all ranks, between real processes that share memory, in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("its processes share the memory of a CPU", allow_module_level=True)

from nanovllm.kernels.triton.collectives import all_gather_last as kernels
from tests.distributed.gathers import gathered, wanted
from tests.distributed.spmd import Pool

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(3)
    yield pool
    pool.close()


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
    length = size * n - padding
    assert pool.run(size, gathered, fn, dtype, n, length) == wanted(fn, dtype, n, length, size)


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
