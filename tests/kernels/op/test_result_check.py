"""The first results of a plugin's kernel have the reference's shapes and dtypes, wherever it is called."""

import re

import pytest
import torch

from nanovllm.kernels import KernelError, all_ops, resolve_kernels
from nanovllm.kernels.op.result_check import results_without_data
from nanovllm.kernels.testing.verify import cases
from tests.kernels.op.plugin_texts import OP

pytestmark = pytest.mark.usefixtures("untouched")
CPU = torch.device("cpu")
PLUGIN = """
from nanovllm.kernels import add_rms_norm, silu_and_mul, store_kvcache

@silu_and_mul.provider("mine")
def mine(gate_up):
    gate, up = gate_up.chunk(2, -1)
    {body}

@add_rms_norm.provider("mine")
def norm(x, residual, weight, eps):
    return x{second}
"""
GOOD = "return gate.sigmoid() * gate * up"
WRONG = [
    ("return gate_up", "the result has shape [4, 64] instead of [4, 32]"),
    ("gate * up", "returned None instead of a tensor: is a `return` missing?"),
    ("return (gate * up).double()", "the result has dtype float64 instead of float32"),
    ("return gate, up", "returned 2 tensors instead of a tensor"),
    ("return 3", "returned a int instead of a tensor"),
]


@pytest.mark.parametrize("body, wrong", WRONG)
@pytest.mark.parametrize("forced", [False, True])
def test_a_wrong_result_names_the_kernel_its_file_and_what_the_reference_returns(plugin, body, wrong, forced):
    path = plugin(PLUGIN.format(body=body, second=", residual"))
    fn = resolve_kernels(CPU, plugins=[path]).silu_and_mul
    said = f"op 'silu_and_mul', provider 'mine' of {path}, called with (float32[4, 64]): {wrong}"
    for _ in range(2):  # not only the first time
        with pytest.raises(KernelError, match=f"^{re.escape(said)}$"):
            if forced:
                with all_ops()["silu_and_mul"].use("mine"):
                    all_ops()["silu_and_mul"](torch.ones(4, 64))
            else:
                fn(torch.ones(4, 64))


def test_each_dtype_is_checked_and_so_are_several_results(plugin):
    body = "return (gate * up).float()"
    kernels = resolve_kernels(CPU, plugins=[plugin(PLUGIN.format(body=body, second=""))])
    assert kernels.silu_and_mul(torch.ones(4, 64)).shape == (4, 32)
    with pytest.raises(KernelError, match="the result has dtype float32 instead of bfloat16"):
        kernels.silu_and_mul(torch.ones(4, 64, dtype=torch.bfloat16))
    x = torch.ones(4, 64)
    with pytest.raises(KernelError, match="returned 1 tensor instead of a tuple of 2 tensors"):
        kernels.add_rms_norm(x, x, torch.ones(64), 1e-6)


def test_the_reference_is_asked_once_for_each_dtype(plugin, monkeypatch):
    asked = []
    declared = all_ops()["silu_and_mul"]
    native = declared.native
    fn = resolve_kernels(CPU, plugins=[plugin(PLUGIN.format(body=GOOD, second=", residual"))]).silu_and_mul
    monkeypatch.setattr(declared, "native", lambda gate_up: asked.append(gate_up.device.type) or native(gate_up))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 4, 7):
            x = torch.randn(rows, 64, dtype=dtype)
            torch.testing.assert_close(fn(x), native(x), rtol=2e-2, atol=2e-2)
    assert asked == ["meta", "meta"]


def test_an_op_of_a_plugin_is_checked_too(plugin):
    path = plugin(OP.format(name="twice").replace("return x + x", "return x.sum()"))
    with pytest.raises(KernelError, match=re.escape("the result has shape [] instead of [2, 3]")):
        resolve_kernels(CPU, plugins=[path]).twice(torch.ones(2, 3))


@pytest.mark.parametrize("name", [name for name, o in all_ops().items() if o.inputs is not None and o.exported])
def test_without_data_the_reference_of_every_op_returns_what_it_returns_with_data(name):
    declared, known = all_ops()[name], 0
    for case in list(cases(declared, full=False, quick=True))[:4]:
        bound = declared.bind(case.arguments(declared, CPU))
        expected = results_without_data(declared, bound.args, bound.kwargs)
        results = declared.native(*bound.args, **bound.kwargs)
        results = [results] if isinstance(results, torch.Tensor) else results
        if expected is None:
            continue
        known += 1
        assert [(r.shape, r.dtype) for r in results] == [(r.shape, r.dtype) for r in expected]
    assert known or results is None
