"""The op `all_gather_last` between processes, by torch.distributed, and what it refuses."""

import pytest
import torch

from nanovllm.distributed.group import SINGLE
from nanovllm.kernels import all_gather_last
from tests.distributed.gathers import gathered, wanted

CASES = [
    (torch.float32, 2, 40, 0),
    (torch.bfloat16, 3, 37, 2),
    (torch.float16, 4, 5, 0),
    (torch.float32, 3, 2049, 2051),  # nothing of the last rank, and part of the one before
]


@pytest.mark.parametrize("dtype, size, n, padding", CASES)
def test_columns_of_many_calls(pool, dtype, size, n, padding):
    length = size * n - padding
    assert pool.run(size, gathered, "native", dtype, n, length) == wanted("native", dtype, n, length, size)


def refused(group, length, shape):
    """The error of a call that must be refused; on all ranks alike, so that none waits."""
    out = None if shape is None else torch.empty(shape)
    with pytest.raises(ValueError) as error:
        all_gather_last.native(torch.zeros(2, 5), length, group, out)
    return str(error.value)


@pytest.mark.parametrize(
    "length, shape, said",
    [
        (16, None, "length=16: must be at most 15, 5 columns of each rank"),
        (-1, None, "length=-1: must be at most 15, 5 columns of each rank"),
        (14, (2, 15), "out: expected [2, 14], got [2, 15]"),
        (14, (1, 14), "out: expected [2, 14], got [1, 14]"),
    ],
)
def test_what_is_refused(pool, length, shape, said):
    assert pool.run(3, refused, length, shape) == said


def test_one_rank_has_its_own_columns_alone():
    with pytest.raises(ValueError, match="length=6: must be at most 5"):
        all_gather_last.native(torch.zeros(2, 5), 6, SINGLE)
