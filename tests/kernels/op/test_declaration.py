"""What ops declare: that each declares everything, and that wrong arguments are named."""

import re

import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.declaration import ArgumentCheck, Cost, Tensors, copy_of, nbytes
from nanovllm.kernels.testing.verify import Case

CPU = torch.device("cpu")
OPS = [o for o in all_ops().values() if o.native.__module__.startswith("nanovllm.") and o.exported]


@pytest.mark.parametrize("declared", OPS, ids=lambda o: o.name)
def test_an_op_declares_all_of_itself(declared):
    assert declared.inputs is not None and declared.inputs.small and declared.inputs.decode, "inputs"
    for shape in (*declared.inputs.small, *declared.inputs.decode, *declared.inputs.large):
        assert declared.inputs.wrong_with(shape) is None, shape
    assert declared.cost is not None, "cost"
    assert {torch.float32, torch.float16, torch.bfloat16} <= set(declared.tolerance), "tolerance"
    assert len(declared.providers) > 1, "a second provider"
    doc = declared.__doc__ or ""
    summary, _, arguments = doc.partition("\n    Args:\n")
    assert len(summary) > 10 and (declared.native.__annotations__["return"] is None or "\n    Returns:\n" in arguments)
    known = set(re.findall(r"\w+", arguments.partition("    Returns:")[0]))
    for other in re.findall(r"The others are those of `(\w+)`", arguments):
        known |= set(all_ops()[other].signature.parameters)
    assert set(declared.signature.parameters) <= known, "what each argument is"
    tensors = [n for n, p in declared.records.flat.parameters.items() if "Tensor" in str(p.annotation)]
    assert set(declared.check.patterns) == set(tensors), "a pattern for every tensor"
    assert set(declared.mutates) | set(declared.reuses) <= set(tensors)


@pytest.mark.parametrize("declared", OPS, ids=lambda o: o.name)
def test_its_inputs_fit_its_signature_and_its_patterns(declared):
    for shape in declared.inputs.small:
        for variant in declared.inputs.variants:
            arguments = Case(shape, torch.float32, variant, strided=True).arguments(declared, CPU)
            declared.check(declared.records.flat.bind(**arguments).arguments)
            cost = declared.cost(**arguments)
            assert isinstance(cost, Cost) and cost.bytes >= 0 and cost.flops >= 0
            if 0 not in shape:
                assert cost.bytes > 0
            again = Case(shape, torch.float32, variant, strided=True).arguments(declared, CPU)
            for name, value in arguments.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(without_nan(value), without_nan(again[name]))


def without_nan(x):
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x.nan_to_num()


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
    assert t.normal(3, 4).stride() == (12, 1) and t.normal(0).shape == (0,)


def test_every_op_is_a_function_of_the_package():
    for declared in OPS:
        assert getattr(kernels, declared.name) is declared and declared.name in kernels.__all__


def test_costs_by_hand():
    def cost(name, shape, **variant):
        return all_ops()[name].cost(**Case(shape, torch.bfloat16, variant).arguments(all_ops()[name], CPU))

    assert cost("rms_norm", (3, 100)).bytes == 2 * (300 + 100 + 300)
    assert cost("add_rms_norm", (3, 100)).bytes == 2 * (4 * 300 + 100)
    assert cost("silu_and_mul", (3, 100)).bytes == 2 * (600 + 300)
    assert cost("fused_add_gelu", (3, 100), approximate="none").bytes == 2 * (300 + 100 + 300)
    assert cost("fused_add_gelu", (3, 100, 1), approximate="none").bytes == 2 * 900
    # 2 sequences of 5 tokens, 2 KV heads of 64, queries in and out of 4 heads.
    decode = cost("attention_decode", (2, 5, 5, 4, 2, 64, 16))
    assert decode.bytes == 2 * (2 * 10 * 2 * 64 + 2 * 2 * 4 * 64) and decode.flops == 4 * 10 * 4 * 64
    # One sequence: 3 new tokens behind 2 cached ones see 3, 4 and 5 keys; with a window of 4: 3, 4 and 4.
    prefill = (1, 3, 3, 2, 4, 2, 64, 16)
    assert cost("attention_prefill", prefill).flops == 4 * 12 * 4 * 64
    assert cost("attention_prefill", prefill, window=4).flops == 4 * 11 * 4 * 64


def test_tensors_are_random_and_repeatable():
    a, b = Tensors(torch.float32, CPU), Tensors(torch.float32, CPU)
    x = a.normal(3, 50)
    assert torch.equal(x, b.normal(3, 50)) and not torch.equal(x, a.normal(3, 50))
    gap = Tensors(torch.float16, CPU, strided=True, scale=50).normal(4, 200)
    assert gap.shape == (4, 200) and gap.stride() == (208, 1) and 40 < gap.float().std() < 60
    assert nbytes(gap, None) == 1600
    drawn = a.uniform(1000, low=2, high=3)
    assert 2 <= drawn.min() < 2.1 and 2.9 < drawn.max() < 3


# ---------------------------------------------------------------------------------------------------- argument patterns


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


def test_a_shape_that_an_op_does_not_have_says_which_it_has():
    inputs = all_ops()["rms_norm"].inputs
    assert inputs.dimensions == ["rows", "size"]
    with pytest.raises(ValueError, match="shape 1x2x3: the op takes ROWSxSIZE, not 3 numbers"):
        inputs(Tensors(torch.float32, CPU), (1, 2, 3))
    inputs = all_ops()["linear_bias_act"].inputs
    assert inputs.wrong_with((1, 2, -3)) == "takes MxKxN[xTRANSPOSED], numbers from 0 on"
    assert inputs.wrong_with((1, 0, 3)) == "needs K of at least 1, not 0 (MxKxN[xTRANSPOSED])"
    assert inputs.wrong_with((0, 2, 3, 1)) is inputs.wrong_with((0, 2, 3)) is None
