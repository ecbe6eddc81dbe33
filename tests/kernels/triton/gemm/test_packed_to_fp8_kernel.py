"""`packed_to_fp8` by one kernel: equal to the bit to the reference, in every form of storage."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops, resolve_kernels
from nanovllm.kernels.ops.packed_to_fp8 import row_factors
from nanovllm.kernels.triton.gemm.packed_to_fp8 import packed_to_fp8
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.rounded_matrix import rounded, rounded_bytes
from nanovllm.weights.quantization.k_quants import to_k_quants
from nanovllm.weights.quantization.online import to_int
from tests.kernels.triton.common import DEVICE, GPU, randn
from tests.kernels.triton.gemm.test_packed_embedding import FORMS, table

pytestmark = pytest.mark.triton
NATIVE = all_ops()["packed_to_fp8"].native
FP8 = torch.float8_e4m3fn


def codes_of(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows, size", [(5, 256), (75, 768)])
def test_equal_to_the_bit(form, rows, size, poison):
    matrix = table(form, size, rows=rows)
    factor, _ = row_factors(matrix.stored().abs().amax(1))
    operands = *matrix.stored_operands(), size, factor
    want = NATIVE(*operands)
    got = packed_to_fp8(*operands)
    assert got.dtype == FP8 and torch.equal(codes_of(got), codes_of(want))
    assert (codes_of(got) & 0x7F).max() == 0x7E  # the largest number, and no NaN
    buffer = torch.full((rows + 2, size), 77, dtype=torch.uint8, device=DEVICE)
    assert packed_to_fp8(*operands, out=buffer[1:-1].view(FP8)).data_ptr() == buffer[1].data_ptr()
    assert torch.equal(buffer[1:-1], codes_of(want)) and bool((buffer[[0, -1]] == 77).all())


@pytest.mark.parametrize("factor", [2.0**-20, 1.0, 2.0**12])
def test_small_numbers_ties_and_too_large_ones(factor, poison):
    """Every integer times powers of two: subnormals of e4m3, numbers in the middle of two, and more than 448."""
    weight = torch.arange(256, dtype=torch.uint8).repeat(24, 1).to(DEVICE)
    scale = torch.exp2(torch.arange(-12.0, 12.0))[:, None].to(DEVICE)
    factors = torch.full((24,), factor, device=DEVICE)
    operands = "int8", weight, scale, None, 256, factors
    assert torch.equal(codes_of(packed_to_fp8(*operands)), codes_of(NATIVE(*operands)))


@pytest.mark.parametrize("form", ["Q4_K", "int8", "int4 zeros"])
def test_strides(form, poison):
    matrix = table(form, 512, rows=40)
    storage, weight, scale, zero = matrix.stored_operands()
    factor, _ = row_factors(matrix.stored().abs().amax(1))
    want = NATIVE(storage, weight, scale, zero, 512, factor)
    wide = torch.zeros(40, weight.shape[1] + 3, dtype=torch.uint8, device=DEVICE)
    wide[:, :-3] = weight
    spread = factor.repeat_interleave(2)[::2]
    got = packed_to_fp8(storage, wide[:, :-3], scale, zero, 512, spread)
    assert torch.equal(codes_of(got), codes_of(want))


def test_blocks_as_stored_are_rounded_by_the_reference():
    matrix = to_k_quants(randn(6, 256, dtype=torch.float32), "Q6_K")
    factor, _ = row_factors(matrix.stored().abs().amax(1))
    operands = *matrix.stored_operands(), 256, factor
    out = torch.zeros(6, 256, dtype=torch.uint8, device=DEVICE).view(FP8)
    assert packed_to_fp8(*operands, out=out) is out
    assert torch.equal(codes_of(out), codes_of(NATIVE(*operands))) and bool(codes_of(out).any())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMS)
def test_in_a_graph_at_real_sizes(form):
    matrix = table(form, 4096, rows=6144)
    factor, _ = row_factors(matrix.stored().abs().amax(1))
    operands = *matrix.stored_operands(), 4096, factor
    want, out = NATIVE(*operands), torch.empty(6144, 4096, dtype=FP8, device=DEVICE)
    packed_to_fp8(*operands, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed_to_fp8(*operands, out=out)
    codes_of(out).zero_()
    graph.replay()
    assert torch.equal(codes_of(out), codes_of(want))


def has_fp8_tensor_cores():
    return GPU and torch.cuda.get_device_capability() >= (8, 9)


QUANTISED = {
    "int4": lambda w: [to_int(w, 4, 128)],
    "int8": lambda w: [to_int(w, 8, 128)],
    "Q4_K over Q6_K": lambda w: [to_k_quants(w[:2048], "Q4_K").as_planes(), to_k_quants(w[2048:], "Q6_K").as_planes()],
}


@pytest.mark.gpu
@pytest.mark.skipif(not has_fp8_tensor_cores(), reason="needs a GPU with fp8 tensor cores")
@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("tokens", [257, 1000, 4096])
def test_products_are_those_of_float64(form, tokens):
    """Layers take turns in one buffer, alone and behind SiLU and a norm; off by the rounding of two numbers to e4m3."""
    kernels = resolve_kernels(torch.device("cuda"), True)
    weights = [
        PackedWeight(QUANTISED[form](randn(4096, 2048, dtype=torch.float32, seed=i) * 0.02), torch.bfloat16, kernels)
        for i in range(3)
    ]
    buffer = torch.empty(max(map(rounded_bytes, weights)), dtype=torch.uint8, device="cuda")
    forms = [rounded(weight, buffer, kernels) for weight in weights]
    for weight, of_many in zip(weights, forms):
        weight.use_for(range(257, 10000), of_many)
        assert weight.form_for(256) is weight and weight.quantised_weights(257) == weight.numel()
    x = randn(tokens, 2048, dtype=torch.bfloat16, seed=9)
    gate_up = randn(tokens, 4096, dtype=torch.bfloat16, seed=10)
    residual, norm = randn(tokens, 2048, dtype=torch.bfloat16, seed=11), randn(2048, dtype=torch.bfloat16, seed=12)
    gate, up = gate_up.double().chunk(2, 1)
    total = (x.float() + residual.float()).bfloat16()
    normed = total.double() * torch.rsqrt(total.double().square().mean(1, keepdim=True) + 1e-6) * norm.double()
    for _ in range(2):
        results = []
        for weight in weights:  # none of them waits for another one
            used = weight.form_for(tokens)
            assert used.takes_gate_up(gate_up) and used.takes_sum(x, residual, norm, 1e-6)
            sums, new = used.product_after_norm(x.clone(), residual.clone(), norm, 1e-6, None)
            assert torch.equal(new, total)
            results.append((used(x), used.product_after_silu(gate_up, None), sums))
        for weight, got in zip(weights, results):
            exact = weight.dequantised().double()
            inputs = x.double(), gate * torch.sigmoid(gate) * up, normed
            for y, of in zip(got, inputs):
                want = of @ exact.T
                error = (y.double() - want).norm() / want.norm()
                assert 0.01 < error < 0.05, error
