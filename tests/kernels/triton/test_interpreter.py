"""The quickened interpreter of `tests.interpreter` computes what Triton's own does."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from tests.kernels.triton.common import INTERPRETED

# The tensors are the CPU's. Where kernels run on a GPU instead, nothing is quickened.
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off")]


@triton.jit
def _after(a, b, c, d):
    """First x -> a * x + b, then x -> c * x + d: the order matters."""
    return a * c, b * c + d


@triton.jit
def _chains(out_ptr, a_ptr, b_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)
    a, b = tl.reduce((tl.load(a_ptr + at), tl.load(b_ptr + at)), AXIS, _after, keep_dims=KEEP)
    count: tl.constexpr = SIZE if AXIS == 0 else ROWS
    to = tl.arange(0, count)
    tl.store(out_ptr + to, a.reshape(count))
    tl.store(out_ptr + count + to, b.reshape(count))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_quickened_reductions_keep_the_order_of_elements(axis, keep):
    a, b = (
        torch.randint(-3, 4, (4, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
        for seed in (0, 1)
    )
    first, second = a.select(axis, 0), b.select(axis, 0)
    for i in range(1, a.shape[axis]):
        first, second = first * a.select(axis, i), second * a.select(axis, i) + b.select(axis, i)
    out = torch.empty(2 * len(first), dtype=torch.int64)
    _chains[(1,)](out, a, b, axis, keep, 4, 8)
    assert torch.equal(out, torch.cat([first, second]))
