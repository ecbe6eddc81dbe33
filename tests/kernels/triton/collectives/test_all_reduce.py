"""The kernel that sums over ranks, between real processes that share memory, in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("its processes share the memory of a CPU", allow_module_level=True)

import triton.language as tl

from nanovllm.kernels import add_rms_norm
from nanovllm.kernels.triton.collectives import all_reduce as kernels
from nanovllm.kernels.triton.collectives.peer_memory import EMPTY, PLACES, peer_memory
from tests.distributed.spmd import Pool

pytestmark = [pytest.mark.triton, pytest.mark.slow]
WIDTH = 40


@pytest.fixture(scope="module")
def pool():
    pool = Pool(3)
    yield pool
    pool.close()


def term(rank, call, rows, dtype):
    """What a rank adds in a call; some values are 0 and -0."""
    x = torch.randn(rows, WIDTH + 3, generator=torch.Generator().manual_seed(10 * call + rank))
    return x.mul(x.abs() > 0.3).to(dtype)[:, :WIDTH]


def summed(group, dtype, sizes):
    """The sums of several calls, of which every second has a norm; in how many rows of them is -0."""
    results = []
    for call, rows in enumerate(sizes):
        x = term(group.rank, call, rows, dtype)
        if call % 2:
            residual = term(9, call, rows, dtype)
            results.append(kernels.all_reduce_add_rms_norm(x, residual, torch.arange(WIDTH).to(dtype), 1e-5, group))
        else:
            results.append((kernels.all_reduce(x, group),))
    return [[t.float().tolist() for t in result] for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_many_calls(pool, dtype, size):
    # More calls than there are turns, of more and fewer rows.
    sizes = [3, 1, 5, 2, 1, 4, 4, 0, 5]
    got = pool.run(size, summed, dtype, sizes)
    for call, rows in enumerate(sizes):
        total = sum(term(rank, call, rows, dtype).float() for rank in range(size)).to(dtype)
        want = (total,)
        if call % 2:
            want = add_rms_norm.native(total, term(9, call, rows, dtype), torch.arange(WIDTH).to(dtype), 1e-5)
        for g, w in zip(got[call], want, strict=True):
            close = dict(rtol=1.6e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.tensor(g).view(w.shape), w.float(), **close)


def too_large(group):
    x = torch.full((5000, 1024), 1.0 + group.rank)
    return kernels.all_reduce(x, group).unique().tolist()


def test_large_sums_are_those_of_torch_distributed(pool):
    assert pool.run(2, too_large) == [3.0]


@triton.jit
def fill(places, value, BLOCK: tl.constexpr):
    at = places + tl.arange(0, BLOCK)
    tl.store(at, tl.full([BLOCK], value, places.dtype.element_ty))


@triton.jit
def copy(places, out, BLOCK: tl.constexpr):
    at = BLOCK - 1 - tl.arange(0, BLOCK)  # the writer's order reversed, so that the two meet
    tl.store(out + at, tl.load(places + at, volatile=True))


def halves_of_values(group, itemsize, value):
    """How many places were read with neither EMPTY nor the value in them while another rank wrote the two by turns."""
    device, places = torch.device("cpu"), 16384
    memory = peer_memory(group, f"halves {itemsize}", places, PLACES[itemsize][0], EMPTY[itemsize], device)
    seen, other = torch.empty_like(memory.own), 0
    for turn in range(1000):
        if group.rank:
            fill[(1,)](memory.opened[0], value if turn % 2 else EMPTY[itemsize], places)
        else:
            copy[(1,)](memory.own, seen, places)
            other += int(((seen != EMPTY[itemsize]) & (seen != value)).sum())
    return -group.smallest(-other, device)


@pytest.mark.parametrize(("itemsize", "value"), [(2, 0x3F81), (4, 0x3F812345)])
def test_a_place_is_read_whole(pool, itemsize, value):
    assert pool.run(2, halves_of_values, itemsize, value) == 0
