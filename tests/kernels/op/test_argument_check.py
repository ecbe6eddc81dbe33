"""The check of a call's arguments: which patterns match, and what an error says."""

import re

import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels.op.argument_check import ArgumentCheck


def check(patterns, **arguments):
    ArgumentCheck("an_op", patterns)(arguments)


def rejected(patterns, **arguments):
    with pytest.raises(ValueError) as error:
        check(patterns, **arguments)
    return str(error.value)


def test_patterns():
    x, n = torch.zeros(2, 3, 8), torch.zeros(8)
    check({"x": "[..., n]", "w": "[n]"}, x=x, w=n)
    check({"x": "[..., n]", "w": "[n] | [..., n]"}, x=x, w=x)
    check({"x": "[..., 2*n]", "y": "[..., n]"}, x=x, y=x[..., :4])
    check({"x": "[a, b, 8]"}, x=x)
    check({"x": "[...]", "i": "int64[t]", "w": "[n]"}, x=torch.zeros(()), i=torch.zeros(3, dtype=torch.int64), w=n)
    check({"x": "[..., n]", "w": "[n]"}, x=x, w=None)  # optional ones are left out
    assert rejected({"x": "[..., n]", "w": "[n]"}, x=x, w=torch.zeros(7)) == (
        "an_op: w: expected the shape [n] with n=8, not [7]"
    )
    assert "expected the shape [..., 2*n], not [3]" in rejected({"x": "[..., 2*n]"}, x=torch.zeros(3))
    assert "w: expected torch.float32, the dtype of x, not torch.float16" in rejected(
        {"x": "[..., n]", "w": "[n]"}, x=x, w=n.half()
    )
    assert "x: expected float16, bfloat16 or float32, not torch.int32" in rejected({"x": "[n]"}, x=n.int())
    assert "i: expected int64, not int32" in rejected({"i": "int64[t]"}, i=n.int())
    assert "w: expected a tensor on cpu, where x is, not on meta" in rejected(
        {"x": "[n]", "w": "[n]"}, x=n, w=n.to("meta")
    )
    assert "x: expected a tensor [n], not 3" in rejected({"x": "[n]"}, x=3)
    # A wrong alternative must not leave its sizes behind.
    check({"x": "[a, b, 8] | [n]", "y": "[a]"}, x=n, y=torch.zeros(5))


def test_ops_name_what_is_wrong():
    x = torch.zeros(2, 8)
    for call, said in [
        (lambda: kernels.rms_norm(x, torch.zeros(7), 1e-6), "rms_norm: weight: expected the shape [size] with size=8"),
        (lambda: kernels.fused_add_gelu(x, torch.zeros(8).half()), "fused_add_gelu: bias: expected torch.float32"),
        (lambda: kernels.embedding(torch.zeros(2), x), "embedding: token_ids: expected int64, not float32"),
        (lambda: kernels.silu_and_mul(torch.zeros(2, 7)), "silu_and_mul: gate_up: expected the shape [..., 2*n]"),
        (lambda: kernels.fused_add_gelu(x, x, "sigmoid"), "approximate: expected 'none' or 'tanh', not 'sigmoid'"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
