"""The reference that rounds packed weights to 8-bit floats: its numbers, and what it says of bad input."""

import pytest
import torch

from nanovllm.kernels import packed_to_fp8
from nanovllm.kernels.ops.linear_fp8_dynamic import quantise_fp8
from nanovllm.kernels.ops.linear_int4 import pack_int4
from nanovllm.kernels.ops.packed_to_fp8 import row_factors
from nanovllm.weights.quantization.k_quants import to_k_quants
from nanovllm.weights.quantization.online import to_int

FP8 = torch.float8_e4m3fn


def e4m3(values):
    """The nearest e4m3 number, ties to even, from its definition: float64 in, float64 out."""
    magnitude = values.abs().clamp(max=448.0)
    exponent = torch.floor(torch.log2(magnitude.clamp_min(2.0**-6))).clamp_min(-6)
    step = torch.exp2(exponent - 3)
    return torch.sign(values) * torch.round(magnitude / step) * step  # torch.round takes ties to even


@pytest.mark.parametrize("make", [
    lambda w: to_int(w, 4, 128), lambda w: to_int(w, 8, 128), lambda w: to_k_quants(w, "Q4_K").as_planes(),
    lambda w: to_k_quants(w, "Q6_K"),
])  # fmt: skip
def test_codes_are_the_nearest_and_scales_give_the_weight_back(make):
    matrix = make(torch.randn(37, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 37)[:, None])
    exact = matrix.dequantised()
    factor, scale = row_factors(exact.abs().amax(1))
    codes = packed_to_fp8(*matrix.stored_operands(), 512, factor)
    assert codes.dtype == FP8 and torch.equal(codes.double(), e4m3((exact * factor[:, None]).double()))
    assert bool((codes.float().abs().amax(1) == 448).all())
    off = (codes.double() * scale[:, None].double() - exact.double()).abs()
    assert bool((off <= exact.double().abs() / 16 + scale[:, None].double() * 2**-10).all())


def test_rows_are_rounded_as_activations_are():
    matrix = to_int(torch.randn(9, 256), 4, 64)
    want, scales = quantise_fp8(matrix.dequantised(), 256)
    factor, scale = row_factors(matrix.dequantised().abs().amax(1))
    got = packed_to_fp8(*matrix.stored_operands(), 256, factor)
    assert torch.equal(got.float(), want.float()) and torch.equal(scale, scales[:, 0])


def test_rows_of_zeros_and_of_the_smallest_numbers():
    weight = pack_int4(torch.tensor([[8] * 32, [9] * 32, [0] * 32]))
    scale = torch.tensor([[1.0], [2.0**-149], [2.0**100]])
    factor, scales = row_factors(torch.tensor([0.0, 2.0**-149, 2.0**103]))
    assert bool(factor.isfinite().all()) and bool((scales > 0).all())
    codes = packed_to_fp8("int4", weight, scale, None, 32, factor).float()
    assert codes[0].tolist() == codes[1].tolist() == [0.0] * 32 and codes[2].tolist() == [-448.0] * 32


def test_beyond_448_is_448():
    weight = torch.tensor([[0, 127, 128, 129, 255]], dtype=torch.uint8)
    codes = packed_to_fp8("int8", weight, torch.ones(1, 1), None, 5, torch.tensor([100.0]))
    assert codes.float().tolist() == [[-448.0, -96.0, 0.0, 96.0, 448.0]]  # 100: a tie, to even


def test_what_it_says_of_bad_input():
    weight, scale, factor = torch.zeros(3, 16, dtype=torch.uint8), torch.ones(3, 1), torch.ones(3)
    with pytest.raises(ValueError, match="storage: expected 'fp8', 'int4', 'int8' or a kind of linear_gguf, not 'q4'"):
        packed_to_fp8("q4", weight, scale, None, 32, factor)
    with pytest.raises(ValueError, match="scale: expected a tensor, for storage 'int4'"):
        packed_to_fp8("int4", weight, None, None, 32, factor)
    with pytest.raises(ValueError, match=r"factor: expected the shape float32\[outputs\] with outputs=3.* not \[4\]"):
        packed_to_fp8("int4", weight, scale, None, 32, torch.ones(4))
    with pytest.raises(ValueError, match="factor: expected float32, not bfloat16"):
        packed_to_fp8("int4", weight, scale, None, 32, factor.bfloat16())
    with pytest.raises(ValueError, match="groups do not divide 32 columns"):
        packed_to_fp8("int4", weight, torch.ones(3, 5), None, 32, factor)
