"""When a layer with weights of 8-bit floats quantises its activations, and when it leaves them alone."""

import dataclasses
import json

import pytest
import torch

from nanovllm import LLM
from nanovllm.bench.workload_cost import ModelShape
from nanovllm.kernels import all_ops, resolve_kernels
from nanovllm.kernels.ops.linear_fp8_dynamic import quantise_fp8
from nanovllm.layers.custom_mlp import GatedMLP
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.layers.packed_weight import PackedWeight, form_for
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.stored_matrices import FloatMatrix
from nanovllm.model_config import ModelConfig
from nanovllm.weights.quantization.online import to_fp8_blocks as to_fp8
from tests import tiny
from tests.native import NATIVE
from tests.providers import registered
from tests.weights.test_quantised_checkpoints import GREEDY, OPTIONS, PACKED, prompts

CPU = torch.device("cpu")
OP, FP8 = "linear_fp8_dynamic", "linear_fp8"
LEAST = 5
REFERENCE = all_ops()[OP].native
AFTER_SILU, AFTER_NORM = (all_ops()[f"{first}_{OP}"] for first in ("silu_and_mul", "add_rms_norm"))


def drawn(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def packed(matrices, accepts=None, num_tokens=lambda weight: range(LEAST, 100), **options):
    """A weight whose products with quantised activations a provider of the test computes, for 5 tokens and more."""
    with registered(OP, REFERENCE, accepts=accepts, num_tokens=num_tokens):
        kernels = resolve_kernels(CPU, True, {OP: ["mine"], "linear_fp8": ["native"]})
    return PackedWeight(matrices, torch.float32, kernels, **options)


def quantises(weight, num_tokens, columns=256):
    x = drawn(num_tokens, columns, seed=1)
    got, exact = weight(x), x @ weight.dequantised().T
    codes, scales = quantise_fp8(x, 128)
    rounded = (codes.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1) @ weight.dequantised().T
    assert not torch.allclose(exact, rounded, atol=1e-4)
    is_rounded = torch.allclose(got, rounded, atol=1e-6)
    assert is_rounded or torch.allclose(got, exact, atol=1e-6)
    return is_rounded


def test_activations_are_quantised_from_a_number_of_tokens_on():
    weight = packed([to_fp8(drawn(128, 256))])
    assert [n for n in (1, LEAST - 1, LEAST, 40) if quantises(weight, n)] == [LEAST, 40]


def test_what_leaves_activations_as_they_are():
    """A weight that was not made for it, a switch, and the reference, which is never preferred."""
    made = to_fp8(drawn(128, 256))
    assert not quantises(packed([to_fp8(drawn(128, 256), quantises_activations=False)]), 40)
    assert not quantises(packed([made], quantise_activations=False), 40)
    assert not quantises(PackedWeight([made], torch.float32, NATIVE), 40)


def test_how_many_weights_are_multiplied_with_quantised_activations():
    made, not_made = to_fp8(drawn(128, 256)), to_fp8(drawn(128, 256, 2), quantises_activations=False)
    both = [made, FloatMatrix(drawn(64, 256, 3))]
    assert [packed(both).quantised_weights(n) for n in (1, LEAST - 1, LEAST, 40)] == [0, 0, 128 * 256, 128 * 256]
    assert packed([not_made]).quantised_weights(40) == 0
    assert packed([made], quantise_activations=False).quantised_weights(40) == 0
    assert packed([made], lambda x, *_: "40" if len(x) == 40 else None).quantised_weights(40) == 0


def test_a_dequantised_copy_takes_activations_as_they_are():
    weight = packed([to_fp8(drawn(128, 256)), FloatMatrix(drawn(64, 256, 3))])
    assert weight.ops == [OP, "linear"] and packed([to_fp8(drawn(8, 256))], quantise_activations=False).ops == [FP8]
    weight.expand_for(range(1, 9))
    x = drawn(8, 256, 1)
    assert torch.allclose(form_for(weight, x) @ x.T, weight.dequantised() @ x.T) and form_for(weight, x) is not weight
    assert [weight.quantised_weights(n) for n in (8, 9)] == [0, 128 * 256]


def test_a_call_that_the_provider_refuses_takes_activations_as_they_are():
    seen = []

    def accepts(x, weight, scale, bias=None):
        seen.append((x.shape, weight.dtype, scale.shape))
        return "not today"

    assert not quantises(packed([to_fp8(drawn(128, 256))], accepts), 40)
    assert seen == [((40, 256), torch.float8_e4m3fn, (1, 2))]


def test_matrices_below_each_other_decide_alone():
    made, not_made = to_fp8(drawn(128, 256)), to_fp8(drawn(128, 256, 2), quantises_activations=False)
    floats = FloatMatrix(drawn(64, 256, 3))
    assert quantises(packed([made, made]), 40)
    assert not quantises(packed([made, not_made]), 40)  # one matrix, with the exact product
    x, bias = drawn(40, 256, 1), drawn(1, 192, 4)[0]
    got = packed([made, floats])(x, bias)
    assert torch.equal(got[:, :128], REFERENCE(x, made.weight, made.scale, bias[:128]))
    assert torch.allclose(got[:, 128:], x @ floats.weight.T + bias[128:], atol=1e-6)


def test_parts_of_a_matrix_are_as_the_whole():
    made = to_fp8(drawn(256, 256))
    parts = [
        made.rows(0, 128), made.rows(3, 7), made.take_rows(torch.tensor([1, 0])), made.padded(300), made.by_row(),
        made.columns(0, 128), made.joined([made]),
    ]  # fmt: skip
    assert all(part.quantising_op == OP for part in parts)
    other = dataclasses.replace(made, quantises_activations=False)
    assert other.quantising_op is other.rows(0, 128).quantising_op is None
    assert made.joined([other]).quantising_op is None


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("floats")
    tiny.save(path, "qwen3", hidden_size=128, intermediate_size=256, head_dim=32)
    return path


def engine_calls(directory, **options):
    """(tokens, outputs of the weight) of every product with quantised activations in a run of an engine."""
    calls = []

    def fn(x, weight, scale, bias=None):
        calls.append((len(x), len(weight)))
        return REFERENCE(x, weight, scale, bias)

    priority = {name: ["native"] for name in all_ops()} | {OP: ["mine"]}
    options = OPTIONS | PACKED | dict(use_custom_kernels=True, kernel_priority=priority) | options
    with registered(OP, fn, num_tokens=lambda weight: range(LEAST, 100)):
        llm = LLM(str(directory), quantization="fp8", **options)
    llm.generate(prompts(), GREEDY, use_tqdm=False)
    told = {n: llm.engine.runner.model.quantised_weights(n) for n in (LEAST - 1, LEAST)}
    return calls, told


@pytest.mark.parametrize("activation, fused", [("silu", True), ("gelu", False)])
def test_a_down_projection_activates_what_it_quantises(activation, fused):
    calls = []

    def of_gate_up(gate_up, weight, scale, bias=None):
        calls.append(len(gate_up))
        return AFTER_SILU.native(gate_up, weight, scale, bias)

    num_tokens = lambda weight: range(LEAST, 100)  # noqa: E731
    with (
        registered(OP, REFERENCE, num_tokens=num_tokens),
        registered(AFTER_SILU.name, of_gate_up, num_tokens=num_tokens),
    ):
        kernels = resolve_kernels(CPU, True, {OP: ["mine"], AFTER_SILU.name: ["mine"]})
    mlp = GatedMLP(256, 128, kernels, activation=activation)
    gate_up, down = to_fp8(drawn(256, 256, 3)), to_fp8(drawn(256, 128, 4))
    for layer, matrix in ((mlp.gate_up_proj, gate_up), (mlp.down_proj, down)):
        del layer.weight
        layer.weight = PackedWeight([matrix], torch.float32, kernels)
    few, many = drawn(LEAST - 1, 256, 1), drawn(LEAST, 256, 2)
    act = all_ops()[f"{activation}_and_mul"].native
    want = act(few @ gate_up.dequantised().T) @ down.dequantised().T
    assert torch.allclose(mlp(few), want, atol=1e-6) and calls == []
    want = REFERENCE(act(REFERENCE(many, *gate_up.operands())), *down.operands())
    assert torch.equal(mlp(many), want) and calls == [LEAST] * fused
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.weight.expand_for(range(LEAST, LEAST + 1))
    want = act(many @ gate_up.dequantised().T) @ down.dequantised().T
    assert torch.allclose(mlp(many), want, atol=1e-6) and calls == [LEAST] * fused


@pytest.mark.parametrize("residual", [True, False])
def test_a_projection_quantises_the_norm_before_it(residual):
    calls = []

    def of_sum(x, *others):
        calls.append(len(x))
        return AFTER_NORM.native(x, *others)

    num_tokens = lambda weight: range(LEAST, 100)  # noqa: E731
    with registered(OP, REFERENCE, num_tokens=num_tokens), registered(AFTER_NORM.name, of_sum, num_tokens=num_tokens):
        kernels = resolve_kernels(CPU, True, {OP: ["mine"], AFTER_NORM.name: ["mine"]})
    mlp, qkv = GatedMLP(256, 128, kernels), QKVParallelLinear(256, 2, 1, 64, True, kernels)
    gate_up, three = to_fp8(drawn(256, 256, 3)), to_fp8(drawn(256, 256, 5))
    for layer, matrix in ((mlp.gate_up_proj, gate_up), (qkv, three)):
        del layer.weight
        layer.weight = PackedWeight([matrix], torch.float32, kernels)
    mlp.down_proj.weight.data, qkv.bias.data = drawn(256, 128, 4), drawn(1, 256, 6)[0]
    norm = RMSNorm(256, 1e-6, kernels)
    norm.weight.data = 1 + drawn(1, 256, 7)[0]
    for n, is_copy in ((LEAST - 1, False), (LEAST, False), (LEAST, True)):
        for layer in (mlp.gate_up_proj, qkv):
            layer.weight.expand_for(range(LEAST, LEAST + is_copy))
        x, before = drawn(n, 256, 1), drawn(n, 256, 2) if residual else None
        total = x if before is None else x + before
        normed = all_ops()["rms_norm"].native(total, norm.weight, 1e-6)
        quantised = n == LEAST and not is_copy
        product = (lambda a, m: REFERENCE(a, *m.operands())) if quantised else lambda a, m: a @ m.dequantised().T
        got, new = qkv.after_norm(ResidualStream(x.clone(), before if before is None else before.clone()), norm)
        assert torch.equal(new, total)
        want = product(normed, three) + qkv.bias
        assert torch.allclose(torch.cat(got, 1).flatten(1), want, atol=1e-5)
        got, new = mlp.after_norm(ResidualStream(x.clone(), before if before is None else before.clone()), norm)
        want = all_ops()["silu_and_mul"].native(product(normed, gate_up)) @ mlp.down_proj.weight.T
        assert torch.equal(new, total) and torch.allclose(got, want, atol=1e-5)
    assert calls == [LEAST, LEAST] * residual


def test_an_engine_quantises_activations_of_prompts_but_never_those_of_the_head(directory):
    calls, told = engine_calls(directory, lm_head_quantization="fp8")
    assert min(tokens for tokens, _ in calls) >= LEAST
    assert {outputs for _, outputs in calls} == {128, 256, 512}  # of the layers; the head has 199
    config = ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))
    assert told == {LEAST - 1: 0, LEAST: ModelShape.of(config, 1).token_parameters}
    assert engine_calls(directory, activation_quantization=False) == ([], {LEAST - 1: 0, LEAST: 0})
