"""`linear_fp8_dynamic`: what its reference rounds, and that the kernel rounds to the same codes."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.ops import (
    add_rms_norm,
    linear_fp8,
    linear_fp8_dynamic,
    silu_and_mul,
    silu_and_mul_linear_fp8_dynamic,
)
from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.ops.linear_fp8_dynamic import columns_of_a_scale, fp8_dynamic_refused, quantise_fp8
from nanovllm.kernels.triton.gemm import fp8_activations
from nanovllm.kernels.triton.gemm.fp8_product import plan_fp8_product
from nanovllm.kernels.triton.gemm.packed_plan import has_shared_operands
from tests.kernels.triton.common import DEVICE, randn, strided

pytestmark = pytest.mark.triton
FP8 = torch.float8_e4m3fn


def weights(outputs, size, rows, columns):
    weight = (64 * randn(outputs, size, dtype=torch.float32, seed=1)).clamp(-448, 448).to(FP8)
    shape = [-(-n // block) if block else 1 for n, block in ((outputs, rows), (size, columns))]
    return weight, (randn(*shape, dtype=torch.float32, seed=2).abs() + 0.1) * size**-0.5 / 64


@pytest.mark.parametrize("size, columns, dtype", [
    (640, 128, torch.bfloat16), (256, 256, torch.float32), (33, 33, torch.bfloat16), (1280, 1280, torch.float32),
])  # fmt: skip
def test_codes_and_scales_are_those_of_the_reference(size, columns, dtype, poison):
    x = strided(randn(5, size, dtype=dtype, scale=3.0))
    x[1] = 0  # a row of zeros
    x[2] *= 1e-20
    x[3, 7] = 3e4  # beside which others are subnormal in 8 bits, or vanish
    codes, scales = fp8_activations.quantised(x, columns)
    want, want_scales = quantise_fp8(x, columns)
    tokens = 64 if columns < size else 32
    assert codes.shape == (tokens, size) and scales.shape == (tokens, size // columns)
    assert torch.equal(codes[:5].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[:5], want_scales) and not codes[5:].float().any()
    assert scales.stride() == (1, tokens)  # column by column, as the library reads them
    assert float(codes.float().abs().max()) == 448


def check_codes(codes, scales, x, columns):
    """Those of x [5, size], which may be rounded another way: to the next of 256 numbers of bfloat16."""
    want, want_scales = quantise_fp8(x, columns)
    assert codes.shape == (64 if columns < x.shape[1] else 32, x.shape[1]) and not codes[5:].float().any()
    torch.testing.assert_close(scales[:5], want_scales, rtol=2**-7, atol=0)
    torch.testing.assert_close(codes[:5].float(), want.float(), rtol=2**-3, atol=2**-8)
    assert (codes[:5].view(torch.uint8) == want.view(torch.uint8)).float().mean() > 0.95


@pytest.mark.parametrize("size, columns", [(640, 128), (4224, 128), (1280, 1280)])
def test_silu_is_rounded_before_it_is_quantised(size, columns, poison):
    gate_up = strided(randn(5, 2 * size, dtype=torch.bfloat16, scale=3.0))
    codes, scales = fp8_activations.quantised(gate_up, columns, gated=True)
    check_codes(codes, scales, silu_and_mul.native(gate_up), columns)


@pytest.mark.parametrize("size, columns", [(640, 128), (96, 96), (1280, 1280)])
def test_a_norm_is_rounded_before_it_is_quantised(size, columns, poison):
    x, residual = (strided(randn(5, size, dtype=torch.bfloat16, scale=3.0, seed=seed)) for seed in (0, 1))
    weight = 1 + randn(size, dtype=torch.bfloat16, seed=2, scale=0.1)
    codes, scales, total = fp8_activations.normed_and_quantised(x, residual, weight, 1e-6, columns)
    normed, want_total = add_rms_norm.native(x, residual, weight, 1e-6)
    assert torch.equal(total, want_total) and scales.stride() == (1, 64 if columns < size else 32)
    check_codes(codes, scales, normed, columns)


@pytest.mark.parametrize("outputs, size, rows, columns", [(144, 640, 128, 128), (16, 96, 1, 0), (9, 33, 0, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_product_of_silu(outputs, size, rows, columns, biased, poison):
    weight, scale = weights(outputs, size, rows, columns)
    gate_up, bias = randn(3, 2, 2 * size, dtype=torch.float32), randn(outputs, dtype=torch.float32) if biased else None
    got = fp8_activations.silu_and_mul_linear_fp8_dynamic(gate_up, weight, scale, bias)
    want = linear_fp8_dynamic.native(silu_and_mul.native(gate_up), weight, scale, bias)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_an_integer_times_its_scale_is_kept():
    x = torch.tensor([[448.0, -3, 0, 0.25] * 32], device=DEVICE)
    codes, scales = quantise_fp8(x, 128)
    assert torch.equal(codes.float(), x) and scales.tolist() == [[1.0]]


@pytest.mark.parametrize("outputs, size, rows, columns", [(136, 640, 128, 128), (16, 96, 1, 0), (9, 33, 0, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(outputs, size, rows, columns, biased, poison):
    weight, scale = weights(outputs, size, rows, columns)
    x, bias = randn(3, 2, size, dtype=torch.bfloat16), randn(outputs, dtype=torch.bfloat16) if biased else None
    got = fp8_activations.linear_fp8_dynamic(x, weight, scale, bias)
    codes, scales = quantise_fp8(x, columns or size)
    rounded = codes.double().unflatten(-1, (-1, columns or size)) * scales.double()[..., None]
    want = F.linear(rounded.flatten(-2), dequantise_fp8(weight, scale, torch.float64))
    want = want if bias is None else want + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=8e-3)
    # Rounding x to 3 bits after the first costs a few per cent of a typical result.
    exact = linear_fp8.native(x.double(), weight, scale, None if bias is None else bias.double())
    error = (want - exact).norm() / exact.norm()
    assert 0.005 < error < 0.04


def test_a_weight_that_no_descriptor_takes_is_multiplied_by_the_reference():
    weight, scale = weights(17, 256, 0, 0)
    part = weight.view(torch.uint8).flatten()[8 : 8 + 16 * 256].view(16, 256).view(FP8)
    x = randn(5, 256, dtype=torch.bfloat16)
    assert "8 bytes into its memory" in str(fp8_dynamic_refused(x, part, scale))
    assert "into its memory" not in str(fp8_dynamic_refused(x, part.clone(), scale))
    got = fp8_activations.linear_fp8_dynamic(x, part, scale)
    assert torch.equal(got, linear_fp8_dynamic.native(x, part, scale))


@pytest.mark.parametrize("capability, least", [((8, 6), None), ((8, 9), 257), ((9, 0), 17), ((12, 0), 257)])
def test_layers_call_it_for_many_tokens_where_there_are_fp8_tensor_cores(capability, least, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    index = 10 * capability[0] + capability[1]  # of no real GPU, since answers are remembered
    numbers = fp8_activations.num_tokens_linear_fp8_dynamic(SimpleNamespace(device=torch.device("cuda", index)))
    assert (numbers[0] if numbers else None) == least and (least is None or 1 << 20 in numbers)


def test_its_flops_are_products_of_8_bit_floats():
    x = randn(3, 200, dtype=torch.bfloat16)
    declared, exact = all_ops()["linear_fp8_dynamic"].cost, all_ops()["linear_fp8"].cost
    weight, scale = weights(256, 200, 1, 0)
    cost = declared(x, weight, scale)
    assert cost.flops == cost.fp8_flops == 2 * 3 * 256 * 200 and exact(x, weight, scale).fp8_flops == 0
    assert cost.bytes == exact(x, weight, scale).bytes
    gated = all_ops()["silu_and_mul_linear_fp8_dynamic"].cost
    assert gated(torch.cat([x, x], -1), weight, scale).fp8_flops == cost.fp8_flops


def test_scales_of_columns_that_no_block_divides_are_refused():
    weight, scale = weights(256, 576, 128, 128)
    assert "576 columns" in fp8_dynamic_refused(randn(2, 576, dtype=torch.bfloat16), weight, scale)
    assert fp8_dynamic_refused(randn(2, 576, dtype=torch.bfloat16), *weights(256, 576, 1, 0)) is None


def test_layers_on_a_cpu_never_call_it():
    assert not fp8_activations.num_tokens_linear_fp8_dynamic(torch.empty(128, 128))


def test_wrong_shapes_are_errors():
    weight, scale = weights(256, 200, 128, 128)
    with pytest.raises(ValueError, match="x: expected a multiple of 128 columns, since scales are of 128, not 200"):
        linear_fp8_dynamic(randn(2, 200, dtype=torch.float32), weight, scale)
    with pytest.raises(ValueError, match=r"x: expected \[..., 200\], as the weight has, not \[2, 128\]"):
        fp8_activations.linear_fp8_dynamic(randn(2, 128, dtype=torch.float32), weight, scale)
    with pytest.raises(
        ValueError, match=r"gate_up: expected \[..., 512\], twice the columns of the weight, not \[2, 256\]"
    ):
        fp8_activations.silu_and_mul_linear_fp8_dynamic(randn(2, 256, dtype=torch.float32), *weights(16, 256, 128, 128))
    with pytest.raises(ValueError, match="scale: expected"):
        linear_fp8_dynamic(randn(2, 200, dtype=torch.float32), weight, scale[:, :1].repeat(3, 1))


@pytest.mark.skipif(DEVICE == "cuda", reason="PyTorch's own product on a CPU, in place of cuBLAS's")
@pytest.mark.parametrize("gated", [False, True])
def test_pytorch_multiplies_where_scales_are_of_rows(gated, poison):
    weight, scale = weights(64, 256, 1, 0)
    x = randn(5, 256 * (1 + gated), dtype=torch.bfloat16)
    codes, scales = fp8_activations.quantised(x, columns_of_a_scale(256, scale), gated)
    got = fp8_activations.library_product(codes, scales, weight, scale, x.dtype)[: len(x)]
    op = silu_and_mul_linear_fp8_dynamic if gated else linear_fp8_dynamic
    torch.testing.assert_close(got, op.native(x, weight, scale), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows, columns", [(0, 0), (1, 0), (128, 128)])
def test_pytorch_takes_the_operands(rows, columns):
    """By its own checks of shapes: what runs on a GPU, on tensors without values."""
    size, outputs = 1024, 256
    codes, scales = fp8_activations.quantised(randn(17, size, dtype=torch.bfloat16), columns or size)
    weight, scale = weights(outputs, size, rows, columns)
    of_weight = fp8_activations.scales_of_weight(scale, outputs)
    operands = (t.to("meta") for t in (codes, weight.t(), scales, of_weight))
    assert torch._scaled_mm(*operands, out_dtype=torch.bfloat16).shape == (64 if columns else 32, outputs)
    if columns:
        assert of_weight.stride() == (1, size // 128) and scales.stride() == (1, 64)
    else:
        assert of_weight.is_contiguous() and scales.is_contiguous()


def test_many_tokens_go_to_the_library_in_pieces():
    """With scales of rows; all pieces are alike, and what is left over of them is there."""
    weight, scale = weights(64, 256, 1, 0)
    for tokens, most in ((48, 48), (80, 48), (144, 48)):
        codes, scales = fp8_activations.quantised(randn(tokens, 256, dtype=torch.bfloat16), 256)
        got = fp8_activations.library_product(codes, scales, weight, scale, torch.bfloat16, most)
        want = (codes.double() * scales.double()) @ dequantise_fp8(weight, scale, torch.float64).T
        assert got.shape == (len(codes), 64)
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, outputs, size", [(300, 512, 4096), (8300, 512, 1024), (400, 256, 12288)])
def test_sums_of_the_library_are_close(tokens, outputs, size, poison):
    """Far closer than x in 8 bits, which is off by 2.6 % of the root mean square."""
    weight, scale = weights(outputs, size, 1, 0)
    codes, scales = fp8_activations.quantised(randn(tokens, size, dtype=torch.bfloat16), size)
    got = fp8_activations.library_product(codes, scales, weight, scale, torch.bfloat16).double()
    want = (codes.double() * scales.double()) @ dequantise_fp8(weight, scale, torch.float64).T
    error = (got - want) / want.square().mean(0).sqrt()
    assert error.square().mean().sqrt() < 0.005 and error.abs().max() < 0.1


# The columns are shared by 2 programs, by 6 and by none; parts of tiles; more tiles than programs run at a time.
@pytest.mark.gpu
@pytest.mark.parametrize("outputs, size", [(6144, 4096), (4096, 12288), (24576, 4096), (1040, 592), (25616, 256)])
def test_products_of_few_tokens_are_close(outputs, size, poison, monkeypatch):
    """With scales of rows. Sums stay in the tensor cores, as the library's do."""
    if not has_shared_operands(torch.cuda.get_device_capability()[0]):
        pytest.skip("the library multiplies here")
    plans = []
    monkeypatch.setattr(
        "nanovllm.kernels.triton.gemm.fp8_product.plan_fp8_product",
        lambda *shape: plans.append(plan_fp8_product(*shape)) or plans[-1],
    )
    weight, scale = weights(outputs, size, 1, 0)
    values = dequantise_fp8(weight, scale, torch.float64)
    squares = values.square()
    for tokens in (17, 31):
        x = randn(tokens, size, dtype=torch.bfloat16)
        x *= 2.0 ** (torch.arange(tokens, device=DEVICE) % 5 - 2)[:, None]  # no token has the scale of its neighbour
        bias = randn(outputs, dtype=torch.bfloat16, seed=3) if tokens == 31 else None
        got = fp8_activations.linear_fp8_dynamic(x, weight, scale, bias).double()
        added = 0 if bias is None else bias.double()
        codes, scales = quantise_fp8(x, size)
        rounded = codes.double() * scales.double()
        error = (got - (rounded @ values.T + added)) / (rounded.square() @ squares.T + added**2).sqrt()
        assert error.square().mean().sqrt() < 0.005 and error.abs().max() < 0.1
    assert len(plans) == 2 and all(plan.weight_first for plan in plans)
