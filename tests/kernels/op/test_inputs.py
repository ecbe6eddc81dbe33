"""Inputs of ops: their tensors, and the shapes that there are."""

import pytest
import torch

from nanovllm.kernels import all_ops
from nanovllm.kernels.op.inputs import Tensors, copy_of, nbytes

CPU = torch.device("cpu")


def test_strided_tensors_have_gaps_that_show():
    t, usual = (Tensors(torch.float32, CPU, strided=strided) for strided in (True, False))
    for made, same in (
        (t.normal(5), usual.normal(5)), (t.parameter(5), usual.parameter(5)), (t.uniform(5), usual.uniform(5)),
        (t.integers(1, 9, 5), usual.integers(1, 9, 5)), (t.permutation(5), usual.permutation(5)),
        (t.spread(torch.ones(3, 4)), usual.spread(torch.ones(3, 4))),
    ):  # fmt: skip
        assert same.is_contiguous() and made.stride(-1) == 2 and torch.equal(made, same) and type(made) is type(same)
        gaps = made.as_strided(made.shape, made.stride(), 1)
        assert (gaps.isnan() if made.is_floating_point() else gaps == 0).all()
        copy = copy_of(made)
        assert copy.stride() == made.stride() and type(copy) is type(made) and torch.equal(copy, made)
    assert Tensors(torch.float32, CPU, strided=True, apart=True).normal(3, 4).stride() == (8, 2)
    assert t.normal(3, 4).stride() == (12, 1) and t.normal(0).shape == (0,)


def test_tensors_are_random_and_repeatable():
    a, b = Tensors(torch.float32, CPU), Tensors(torch.float32, CPU)
    x = a.normal(3, 50)
    assert torch.equal(x, b.normal(3, 50)) and not torch.equal(x, a.normal(3, 50))
    gap = Tensors(torch.float16, CPU, strided=True, scale=50).normal(4, 200)
    assert gap.shape == (4, 200) and gap.stride() == (208, 1) and 40 < gap.float().std() < 60
    assert nbytes(gap, None) == 1600
    drawn = a.uniform(1000, low=2, high=3)
    assert 2 <= drawn.min() < 2.1 and 2.9 < drawn.max() < 3


def test_a_shape_that_an_op_does_not_have_says_which_it_has():
    inputs = all_ops()["rms_norm"].inputs
    assert inputs.dimensions == ["rows", "size"]
    with pytest.raises(ValueError, match="shape 1x2x3: the op takes ROWSxSIZE, not 3 numbers"):
        inputs(Tensors(torch.float32, CPU), (1, 2, 3))
    inputs = all_ops()["linear_bias_act"].inputs
    assert inputs.wrong_with((1, 2, -3)) == "takes MxKxN[xTRANSPOSED], numbers from 0 on"
    assert inputs.wrong_with((1, 0, 3)) == "needs K of at least 1, not 0 (MxKxN[xTRANSPOSED])"
    assert inputs.wrong_with((0, 2, 3, 1)) is inputs.wrong_with((0, 2, 3)) is None
