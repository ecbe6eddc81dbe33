"""What ops declare: that each declares everything, for its own signature."""

import re

import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.inputs import Cost
from nanovllm.kernels.testing.verify import Case, cases

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
def test_other_leading_dimensions_fit_its_patterns(declared):
    for case in (case for case in cases(declared, full=False) if case.leading is not None):
        arguments = case.arguments(declared, CPU)
        declared.check(declared.records.flat.bind(**arguments).arguments)
        first = {name: pattern.partition("[")[2] for name, pattern in declared.arguments.items() if name in arguments}
        led = [name for name, dimensions in first.items() if dimensions.startswith("...")]
        assert led and all(arguments[name].shape[: len(case.leading)] == case.leading for name in led)


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
