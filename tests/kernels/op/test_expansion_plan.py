"""For how many tokens layers multiply with a dequantised copy of a packed weight."""

import pytest
import torch

from nanovllm.kernels import Kernels, Provider, all_ops
from nanovllm.kernels.op.expansion_plan import ANY, MEASURED, ExpansionPlan, ExpansionRule
from nanovllm.models.model_presets import preset
from tests.native import NATIVE

HOPPER, GIB = (9, 0), 2**30
DYNAMIC, FP8, INT4, INT8, GGUF = "linear_fp8_dynamic", "linear_fp8", "linear_int4", "linear_int8", "linear_gguf"
SIZES = [1, 8, 12, 16, 24, 48, 128, 192, 256, 512, 1024, 2048, 4096, 16384]
NAMES = DYNAMIC, FP8, INT4, INT8, GGUF


def kernels(**others):
    """Kernels of the package for all packed products, but other providers for those that are named."""
    chosen = {name: (others.get(name, Provider("triton", fn)), fn) for name, fn in REFERENCES.items()}
    return Kernels(chosen)


REFERENCES = {name: all_ops()[name].native for name in NAMES}


def plan(dtype=torch.bfloat16, capability=HOPPER, **others):
    return ExpansionPlan.measured(capability, 100 * GIB, dtype, kernels(**others))


def layer_weights(name):
    """The weights of the matrices in a decoder layer of a preset."""
    c = preset(name)
    heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
    return c["hidden_size"] * (heads * c["head_dim"] + 3 * c["intermediate_size"])


def test_the_measured_cases():
    """The copy where 16 bits were faster, the packed form where that was, for the shapes that were measured."""
    smallest, small, large = (layer_weights(f"qwen3-{size}") for size in ("0.6b", "1.7b", "8b"))
    assert (smallest, small, large) == (15_728_640, 50_331_648, 192_937_984)
    chosen = plan()
    assert all(chosen.num_tokens([name], large) == range(0) for name in NAMES)
    assert all(chosen.num_tokens([name], smallest) == ANY for name in (FP8, INT4, INT8, GGUF))
    fp8 = chosen.num_tokens([DYNAMIC], smallest)
    assert [n for n in SIZES if n in fp8] == SIZES[: SIZES.index(1024) + 1]
    fp8 = chosen.num_tokens([DYNAMIC], small)
    assert [n for n in SIZES if n in fp8] == [24, 48, 128, 192, 256]
    for name in (INT4, INT8, GGUF):
        some = chosen.num_tokens([name], small)
        assert [n for n in SIZES if n in some] == SIZES[2:]


def test_a_weight_of_several_forms_has_a_copy_where_all_want_it():
    rules = [ExpansionRule(("a",), 10, range(3, 20)), ExpansionRule(("b",), 10, range(5, 30))]
    rules.append(ExpansionRule(("a", "b"), 100, range(7, 9)))
    chosen = ExpansionPlan(rules, 0)
    assert chosen.num_tokens(["a"], 10) == range(3, 20) and chosen.num_tokens(["a"], 11) == range(7, 9)
    assert chosen.num_tokens(["a", "b", "linear"], 10) == range(5, 20)
    for ops in (["linear"], [], ["c"], ["a", "c"]):
        assert not chosen.num_tokens(ops, 10), ops
    assert not chosen.num_tokens(["a"], 101)


def test_only_what_was_measured():
    """On that GPU, with 16 bits, and by the package's own kernels."""
    assert plan(torch.float32) is plan(capability=(8, 0)) is plan(capability=(12, 0)) is None
    assert plan(torch.float16).num_tokens([INT4], 1) == ANY
    assert plan().max_bytes == int(0.04 * 100 * GIB)
    assert ExpansionPlan.measured(HOPPER, GIB, torch.bfloat16, NATIVE) is None
    own = Provider("mine", REFERENCES[INT4], origin="my_kernels.py")
    mixed = plan(linear_int4=own, linear_gguf=Provider("native", REFERENCES[GGUF]))
    assert mixed.num_tokens([INT8], 1) == ANY
    assert not mixed.num_tokens([INT4], 1) and not mixed.num_tokens([GGUF], 1)


@pytest.mark.parametrize("capability", MEASURED)
def test_the_table_names_ops_of_packed_weights(capability):
    assert {name for rule in MEASURED[capability] for name in rule.ops} == set(NAMES)
    assert all(rule.num_tokens and rule.max_layer_weights for rule in MEASURED[capability])
