"""Ops as layers call them: the selected provider, and a result that goes where the caller wants it."""

import pytest
import torch

from nanovllm.kernels import resolve_kernels
from nanovllm.layers.selected_op import FusedOp, SelectedOp
from tests.providers import registered

CPU = torch.device("cpu")


def mine(op):
    return resolve_kernels(CPU, True, {op: ["mine"]})


@pytest.mark.parametrize("takes_out", [False, True])
def test_a_result_goes_into_a_given_tensor(takes_out):
    calls = []

    def fn(x, residual=None, *, out=None):
        calls.append(out is not None)
        return x * 2 if out is None else torch.mul(x, 2, out=out)

    with registered("softmax", fn, takes_out=takes_out):
        op = SelectedOp("softmax", mine("softmax"))
    x, around = torch.randn(3, 4), torch.zeros(5, 4)
    assert torch.equal(op(x, concurrent=True), x * 2) and calls == [False]
    got = op(x, out=around[1:4])
    assert got.data_ptr() == around[1:].data_ptr() and torch.equal(around[1:4], x * 2)
    assert not around[0].any() and not around[4].any() and calls == [False, takes_out]


def test_the_reference_is_copied_from():
    op = SelectedOp("softmax", resolve_kernels(CPU, False))
    x, out = torch.randn(3, 4), torch.zeros(3, 4)
    assert op(x, out=out) is out and torch.allclose(out, x.softmax(-1))


def test_a_call_that_the_provider_does_not_accept_is_copied_too():
    def fn(x, *, out=None, concurrent=False):
        raise AssertionError("not called")

    with registered("softmax", fn, accepts=lambda x, **kwargs: "not today", takes_out=True, takes_concurrent=True):
        op = SelectedOp("softmax", mine("softmax"))
        x, out = torch.randn(3, 4), torch.zeros(3, 4)
        assert op(x, out=out) is out and torch.allclose(out, x.softmax(-1))
        assert torch.allclose(op(x, concurrent=True), x.softmax(-1))


def test_a_fused_op_is_used_if_a_custom_provider_was_selected():
    assert not FusedOp("linear", None).used
    native = FusedOp("linear", resolve_kernels(CPU, False))
    assert not native.used and not native.takes(torch.zeros(1, 4), torch.zeros(3, 4))


@pytest.mark.parametrize("limit", [None, lambda weight: range(1, 9)])
def test_a_provider_says_for_how_many_tokens_it_is_called(limit):
    with registered("linear", torch.nn.functional.linear, num_tokens=limit):
        op = FusedOp("linear", mine("linear"))
    weight = torch.zeros(3, 4)
    assert op.takes(torch.zeros(8, 4), weight) and op.takes(torch.zeros(1000, 4), weight) == (limit is None)
