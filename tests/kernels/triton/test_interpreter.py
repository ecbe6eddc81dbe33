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


@triton.jit
def _mixed(out_ptr, a_ptr, b_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr, WRONG: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + rows), tl.load(b_ptr + columns)
    chosen = tl.where(a > b, 2 * a, b - 1)
    if WRONG:
        chosen += tl.arange(0, 2 * SIZE)
    tl.store(out_ptr + rows * SIZE + columns, chosen * tl.program_id(0) + (a + 3) % 7)
    tl.store(out_ptr + ROWS * SIZE + rows, tl.sum(a * b, 1, keep_dims=True))


def test_operands_of_other_shapes_are_broadcast_or_refused():
    a, b = torch.randint(-9, 9, (4, 1)), torch.randint(-9, 9, (8,))
    out = torch.empty(4 * 8 + 4, dtype=torch.int64)
    _mixed[(2,)](out, a, b, 4, 8, False)
    expected = torch.where(a > b, 2 * a, b - 1) + torch.fmod(a + 3, 7)
    assert torch.equal(out, torch.cat([expected.flatten(), (a * b).sum(1)]))
    with pytest.raises(Exception, match="incompatible dimensions|Cannot make_shape_compatible"):
        _mixed[(1,)](out, a, b, 4, 8, True)
