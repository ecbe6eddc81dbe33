"""Packed weights as 8-bit floats for many tokens: what is multiplied, in memory that weights share."""

import pytest
import torch

from nanovllm.kernels import all_ops, resolve_kernels
from nanovllm.kernels.ops.linear_fp8_dynamic import quantise_fp8
from nanovllm.layers.custom_mlp import GatedMLP
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.rounded_matrix import RoundedMatrix, largest_of_rows, rounded, rounded_bytes
from nanovllm.layers.stored_matrices import FloatMatrix, Fp8Matrix, IntMatrix
from nanovllm.weights.quantization.k_quants import to_k_quants
from nanovllm.weights.quantization.online import to_fp8, to_int
from tests.native import NATIVE
from tests.providers import registered

CPU = torch.device("cpu")
OP = "linear_fp8_dynamic"
FUSED = [f"{first}_{OP}" for first in ("silu_and_mul", "add_rms_norm")]
REFERENCE = all_ops()[OP].native
LEAST = 5
MANY = range(LEAST, 1 << 30)


def drawn(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.fixture
def kernels():
    """References, of which the ops that quantise activations are registered as providers of the test."""
    with registered(OP, REFERENCE), registered(FUSED[0], all_ops()[FUSED[0]].native):
        with registered(FUSED[1], all_ops()[FUSED[1]].native):
            yield resolve_kernels(CPU, True, {name: ["mine"] for name in (OP, *FUSED)})


def with_form(matrices, kernels, buffer=None):
    weight = PackedWeight(matrices, torch.float32, kernels)
    if buffer is None:
        buffer = torch.zeros(rounded_bytes(weight), dtype=torch.uint8)
    weight.use_for(MANY, rounded(weight, buffer, kernels))
    return weight


def both_rounded(x, exact):
    """x W^T with both rounded to e4m3, each row with a scale."""
    codes, scales = (torch.cat(parts) for parts in zip(*(quantise_fp8(row[None], exact.shape[1]) for row in exact)))
    return REFERENCE(x, codes, scales)


INT4, INT8 = (lambda w: to_int(w, 4, 64)), (lambda w: to_int(w, 8, 64))
Q4, Q6 = (lambda w: to_k_quants(w, "Q4_K").as_planes()), (lambda w: to_k_quants(w, "Q6_K").as_planes())


@pytest.mark.parametrize("forms", [[INT4], [INT8], [Q4], [Q4, Q6], [Q6, INT4, INT8]])
def test_many_tokens_multiply_rounded_weights_and_few_the_packed_ones(forms, kernels):
    parts = [form(drawn(48, 256, i)) for i, form in enumerate(forms)]
    weight, x, bias = with_form(parts, kernels), drawn(40, 256, 9), drawn(1, 48 * len(forms), 8)[0]
    exact = weight.dequantised()
    few, many = weight.form_for(LEAST - 1), weight.form_for(LEAST)
    assert few is weight and weight.form_changes == {LEAST, MANY.stop}
    assert torch.allclose(few(x, bias), x @ exact.T + bias, atol=1e-5)
    assert len(many.matrices) == 1, "one product for all that is packed"
    assert torch.allclose(many(x, bias), both_rounded(x, exact) + bias, atol=1e-6)
    assert not torch.allclose(many(x, bias), x @ exact.T + bias, atol=1e-4)
    assert [weight.quantised_weights(n) for n in (LEAST - 1, LEAST)] == [0, exact.numel()]
    assert torch.equal(many.dequantised(), many.matrices[0].weight.float() * many.matrices[0].scale)


def test_the_form_is_no_part_of_the_weight(kernels):
    weight = with_form([INT4(drawn(32, 128))], kernels)
    assert [m for m in weight.modules() if isinstance(m, PackedWeight)] == [weight]
    assert not list(weight.parameters()) and weight.nbytes == sum(plane.nbytes for plane in weight.planes)


def test_weights_take_turns_in_one_buffer(kernels):
    """Each product finds its own weight there, also in fused ops, and whatever was there before."""
    weights = [PackedWeight([form(drawn(n, 256, n))], torch.float32, kernels) for n, form in ((64, INT4), (32, Q4))]
    buffer = torch.full((max(map(rounded_bytes, weights)),), 0x7F, dtype=torch.uint8)  # NaN
    assert len(buffer) == 64 * 256
    for weight in weights:
        weight.use_for(MANY, rounded(weight, buffer, kernels))
    x, gate_up, norm = drawn(7, 256, 3), drawn(7, 512, 4), 1 + drawn(1, 256, 5)[0]
    gated = all_ops()["silu_and_mul"].native(gate_up)
    normed, _ = all_ops()["add_rms_norm"].native(x.clone(), x.clone(), norm, 1e-6)
    for _ in range(2):
        for weight in weights:
            form, exact = weight.form_for(7), weight.dequantised()
            assert form.takes_gate_up(gate_up) and form.takes_sum(x, x, norm, 1e-6)
            assert torch.allclose(form.product_after_silu(gate_up, None), both_rounded(gated, exact), atol=1e-5)
            buffer.fill_(0x7F)
            sums, _ = form.product_after_norm(x.clone(), x.clone(), norm, 1e-6, None)
            assert torch.allclose(sums, both_rounded(normed, exact), atol=1e-4)
            buffer.fill_(0x7F)
            assert torch.allclose(form(x), both_rounded(x, exact), atol=1e-6)


def permuted(matrix, seed):
    order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(seed))
    return IntMatrix(matrix.weight, matrix.scale, matrix.zero, matrix.bits, order)


def test_columns_in_another_order(kernels):
    """Of `desc_act`: x is brought into that order before it is quantised, so no fused op takes it."""
    one, two, other = (permuted(form(drawn(32, 256, i)), seed) for i, (form, seed) in enumerate(
        [(INT4, 1), (INT8, 1), (INT4, 2)]
    ))  # fmt: skip
    weight, x = with_form([one, two, other], kernels), drawn(9, 256, 4)
    form = weight.form_for(9)
    assert [m.shape for m in form.matrices] == [(64, 256), (32, 256)]
    want = torch.cat([both_rounded(x, m.dequantised()) for m in (one, two, other)], 1)
    assert torch.allclose(form(x), want, atol=1e-6)
    alone = with_form([one], kernels).form_for(9)
    assert not alone.takes_gate_up(drawn(9, 512)) and not alone.takes_sum(x, x, x[0], 1e-6)
    assert torch.allclose(alone(x), both_rounded(x, one.dequantised()), atol=1e-6)


def test_what_is_stored_in_floats_stays_and_in_8_bit_floats_needs_no_rounding(kernels):
    floats, eight = FloatMatrix(drawn(32, 256, 1)), to_fp8(drawn(48, 256, 2), quantises_activations=False)
    parts = [INT4(drawn(16, 256)), floats, eight]
    weight, x = with_form(parts, kernels), drawn(9, 256, 4)
    form = weight.form_for(9)
    assert [type(m) for m in form.matrices] == [RoundedMatrix, FloatMatrix, Fp8Matrix]
    assert rounded_bytes(weight) == 16 * 256 and form.matrices[2].weight is eight.weight
    got, want = form(x).split([16, 32, 48], 1), x @ floats.weight.T
    assert torch.allclose(got[0], both_rounded(x, parts[0].dequantised()), atol=1e-6)
    assert torch.allclose(got[1], want, atol=1e-6)
    assert torch.allclose(got[2], REFERENCE(x, eight.weight, eight.scale), atol=1e-6)
    assert weight.quantised_weights(9) == (16 + 48) * 256


def test_without_a_provider_nothing_is_quantised():
    weight = with_form([INT4(drawn(32, 256))], NATIVE)
    assert weight.quantised_weights(9) == 0


def test_largest_of_rows_whatever_is_dequantised_together():
    matrix = Q6(drawn(37, 256))
    want = matrix.dequantised().abs().amax(1)
    for at_once in (1, 256 * 5, 1 << 30):
        assert torch.equal(largest_of_rows(matrix, at_once), want)


def test_an_mlp_quantises_where_it_norms_and_activates(kernels):
    mlp, norm = GatedMLP(256, 256, kernels), RMSNorm(256, 1e-6, kernels)
    gate_up, down = INT4(drawn(512, 256, 3)), Q4(drawn(256, 256, 4))
    buffer = torch.zeros(512 * 256, dtype=torch.uint8)
    for layer, matrix in ((mlp.gate_up_proj, gate_up), (mlp.down_proj, down)):
        del layer.weight
        layer.weight = with_form([matrix], kernels, buffer)
    norm.weight.data = 1 + drawn(1, 256, 7)[0]
    act, rms = all_ops()["silu_and_mul"].native, all_ops()["rms_norm"].native
    for n in (LEAST - 1, LEAST):
        x, before = drawn(n, 256, 1), drawn(n, 256, 2)
        product = both_rounded if n == LEAST else lambda a, w: a @ w.T
        got, total = mlp.after_norm(ResidualStream(x.clone(), before.clone()), norm)
        normed = rms(x + before, norm.weight, 1e-6)
        want = product(act(product(normed, gate_up.dequantised())), down.dequantised())
        assert torch.equal(total, x + before) and torch.allclose(got, want, atol=1e-3)
        assert (got - want).norm() < 1e-3 * want.norm() or n == LEAST
