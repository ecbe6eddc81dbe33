"""What layers call: the chosen provider, and a result that goes where the caller wants it."""

from types import SimpleNamespace

import pytest
import torch

from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.layers.fused_op import ChosenOp, FusedOp


@pytest.mark.parametrize("takes_out", [False, True])
def test_a_result_goes_into_a_given_tensor(takes_out):
    calls = []

    def fn(x, residual=None, *, out=None):
        calls.append(out is not None)
        return x * 2 if out is None else torch.mul(x, 2, out=out)

    if takes_out:
        fn.takes_out = True
    all_ops()["softmax"].providers["mine"] = Provider("mine", fn)
    try:
        op = ChosenOp("softmax", resolve_kernels(torch.device("cpu"), True, {"softmax": ["mine"]}))
    finally:
        del all_ops()["softmax"].providers["mine"]
    x = torch.randn(3, 4)
    around = torch.zeros(5, 4)
    assert torch.equal(op(x), x * 2) and calls == [False]
    got = op(x, out=around[1:4])
    assert got.data_ptr() == around[1:].data_ptr() and torch.equal(around[1:4], x * 2)
    assert not around[0].any() and not around[4].any() and calls == [False, takes_out]


def test_the_reference_is_copied_from():
    op = ChosenOp("softmax", resolve_kernels(torch.device("cpu"), False))
    x, out = torch.randn(3, 4), torch.zeros(3, 4)
    assert op(x, out=out) is out and torch.allclose(out, x.softmax(-1))


def test_a_call_that_the_provider_does_not_accept_is_copied_too():
    def fn(x, *, out=None, beside=False):
        raise AssertionError("not called")

    fn.takes_out = fn.takes_beside = True
    all_ops()["softmax"].providers["mine"] = Provider("mine", fn, accepts=lambda x, **kwargs: "not today")
    try:
        op = ChosenOp("softmax", resolve_kernels(torch.device("cpu"), True, {"softmax": ["mine"]}))
        x, out = torch.randn(3, 4), torch.zeros(3, 4)
        assert op(x, out=out) is out and torch.allclose(out, x.softmax(-1))
        assert op.takes_beside and torch.allclose(op(x, beside=True), x.softmax(-1))
    finally:
        del all_ops()["softmax"].providers["mine"]


def test_an_op_that_fuses_is_used_where_a_custom_provider_was_chosen():
    assert not FusedOp("linear", None).used
    assert not FusedOp("linear", SimpleNamespace(linear=None)).used
    assert not FusedOp("linear", resolve_kernels(torch.device("cpu"), False)).used
