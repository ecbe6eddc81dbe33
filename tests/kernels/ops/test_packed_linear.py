"""The references of linear layers with packed weights: their numbers, and what they say of bad input."""

import numpy as np
import pytest
import torch

from nanovllm.kernels import linear_fp8, linear_gguf, linear_int4, linear_int8
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, dequantise_gguf, gguf_planes
from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.ops.linear_int4 import pack_int4, unpack_int4

FP8 = torch.float8_e4m3fn


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def fp8(*shape):
    return (64 * torch.randn(*shape)).clamp(-448, 448).to(FP8)


# ---- 8-bit floats


@pytest.mark.parametrize("outputs, size", [(300, 200), (128, 128), (1, 1), (100, 100), (129, 257)])
@pytest.mark.parametrize("rows", ["whole", "each", "blocks"])
@pytest.mark.parametrize("columns", ["whole", "blocks"])
def test_fp8_is_scaled_by_blocks(outputs, size, rows, columns):
    weight = fp8(outputs, size)
    height = {"whole": outputs, "each": 1, "blocks": 128}[rows]
    width = {"whole": size, "blocks": 128}[columns]
    scale = torch.rand(-(-outputs // height), -(-size // width)) + 0.5
    expected = weight.float()
    for i in range(outputs):
        for j in range(0, size, width):
            expected[i, j : j + width] *= scale[i // height, j // width]
    assert torch.equal(dequantise_fp8(weight, scale), expected)
    x, bias = randn(3, size), randn(outputs)
    torch.testing.assert_close(linear_fp8(x, weight, scale, bias), x @ expected.T + bias)


def test_fp8_of_every_code():
    """Subnormals, 448 and NaN among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)[None]
    got = dequantise_fp8(codes, torch.tensor([[2.0]]))
    sign, exponent, mantissa = (torch.arange(256) >> 7), (torch.arange(256) >> 3 & 15), (torch.arange(256) & 7)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    value = torch.where((torch.arange(256) & 127) == 127, torch.nan, value * (1 - 2.0 * sign))
    assert torch.equal(got[0].nan_to_num(nan=1e9), (2 * value).nan_to_num(nan=1e9))
    assert float(got[0].nan_to_num().max()) == 896


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (3, 3), (299, 1), (300, 200), (0, 1)])
def test_fp8_names_a_scale_of_the_wrong_shape(shape):
    with pytest.raises(ValueError, match=rf"scale: expected .*\[300, 200\].*not \[{shape[0]}, {shape[1]}\]") as error:
        linear_fp8(randn(2, 200), fp8(300, 200), torch.ones(shape))
    assert "[1, 300 or 3, 1 or 2]" in str(error.value)


def test_fp8_names_wrong_dtypes():
    x, weight, scale = randn(2, 8), fp8(4, 8), torch.ones(1, 1)
    with pytest.raises(ValueError, match="weight: expected float8_e4m3fn, not float32"):
        linear_fp8(x, weight.float(), scale)
    with pytest.raises(ValueError, match="weight: expected float8_e4m3fn, not float8_e5m2"):
        linear_fp8(x, weight.float().to(torch.float8_e5m2), scale)
    with pytest.raises(ValueError, match="scale: expected float32, not bfloat16"):
        linear_fp8(x, weight, scale.bfloat16())
    with pytest.raises(ValueError, match=r"weight: expected the shape .* with size=7, not \[4, 8\]"):
        linear_fp8(x[:, :7], weight, scale)


# ---- 4 and 8 bits with groups


@pytest.mark.parametrize("bits, op", [(4, linear_int4), (8, linear_int8)])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zeros", [False, True])
def test_affine(bits, op, scale_dtype, zeros):
    outputs, size, groups = 7, 24, 3
    q = torch.randint(0, 2**bits, (outputs, size))
    scale = (torch.rand(outputs, groups) + 0.5).to(scale_dtype)
    zero = torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8) if zeros else None
    expected = torch.empty(outputs, size)
    for i in range(outputs):
        for j in range(size):
            z = int(zero[i, j // 8]) if zeros else 2 ** (bits - 1)
            expected[i, j] = (int(q[i, j]) - z) * float(scale[i, j // 8])
    x, bias = randn(2, 3, size), randn(outputs)
    weight = pack_int4(q) if bits == 4 else q.to(torch.uint8)
    torch.testing.assert_close(op(x, weight, scale, zero, bias), x @ expected.T + bias)


def test_int4_has_the_even_column_in_the_low_bits():
    assert unpack_int4(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)).tolist() == [[1, 2, 0, 15]]
    q = torch.randint(0, 16, (3, 10))
    assert torch.equal(unpack_int4(pack_int4(q)), q)


@pytest.mark.parametrize("op, columns", [(linear_int4, 12), (linear_int8, 24)])
def test_affine_names_groups_that_do_not_divide_the_columns(op, columns):
    weight = torch.zeros(5, columns, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scale: 5 groups do not divide 24 columns"):
        op(randn(2, 24), weight, torch.ones(5, 5))
    with pytest.raises(ValueError, match="scale: 0 groups do not divide 24 columns"):
        op(randn(2, 24), weight, torch.ones(5, 0))
    with pytest.raises(ValueError, match="zero: expected the shape .*groups=3"):
        op(randn(2, 24), weight, torch.ones(5, 3), torch.zeros(5, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="zero: expected uint8, not int32"):
        op(randn(2, 24), weight, torch.ones(5, 3), torch.zeros(5, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="scale: expected bfloat16 or float16 or float32, not float64"):
        op(randn(2, 24), weight, torch.ones(5, 3, dtype=torch.float64))


def test_int4_names_an_odd_number_of_columns():
    with pytest.raises(ValueError, match=r"x: expected the shape \[..., 2\*half\]"):
        linear_int4(randn(2, 23), torch.zeros(5, 12, dtype=torch.uint8), torch.ones(5, 1))


# ---- GGUF


def packed(name, rows=9, blocks=3):
    """Random rows whose float16 scales are finite: zero and subnormal ones among them."""
    of = GGUF_TYPES[name]
    weight = torch.randint(0, 256, (rows, blocks, of.block_bytes), dtype=torch.uint8)
    at = 0
    for field, n in of.fields:
        if field in ("d", "m"):
            number = torch.randn(rows, blocks, 1) * torch.tensor([1.0, 1e-6, 0.0]).view(1, 3, 1)[:, :blocks]
            weight[..., at : at + n] = number.half().view(torch.uint8)
        at += n
    return weight.flatten(1)


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_equals_the_gguf_package_to_the_bit(name):
    gguf = pytest.importorskip("gguf")
    weight = packed(name)
    expected = torch.from_numpy(gguf.dequantize(weight.numpy(), gguf.GGMLQuantizationType[name]).astype(np.float32))
    size = expected.shape[1]
    assert GGUF_TYPES[name].type_id == gguf.GGMLQuantizationType[name].value
    got = dequantise_gguf(weight, name, size)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    planes, kind = gguf_planes(weight, name)
    assert torch.equal(dequantise_gguf(planes, kind, size).view(torch.int32), expected.view(torch.int32))
    x, bias = randn(2, size), randn(len(weight))
    torch.testing.assert_close(linear_gguf(x, planes, kind, bias), x @ expected.T + bias, rtol=1e-4, atol=1e-4)
    wide = dequantise_gguf(weight, name, size, torch.float64)
    torch.testing.assert_close(wide.float(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_planes_are_aligned_and_rows_stay_rows(name):
    weight, of = packed(name, rows=2, blocks=3), GGUF_TYPES[name]
    planes, _ = gguf_planes(weight, name)
    offsets, total = of.plane_offsets(3 * of.block_size)
    assert planes.shape == (2, total) and not any(n % 16 for n in (total, *offsets.values()))
    assert list(offsets) == list(of.planes) and of.planes["q"] * 8 == of.bits * of.block_size
    rows, _ = gguf_planes(weight[1:], name)
    assert torch.equal(rows, planes[1:])


def test_planes_of_q6_k_have_six_bits_and_the_order_that_kernels_read():
    """Each quant's high bits are where the docstring of gguf_blocks says, and no others."""
    of = GGUF_TYPES["Q6_K"]
    assert of.plane_offsets(4096)[1] * 8 / 4096 == 6.5625
    planes = torch.zeros(1, of.plane_offsets(256)[1], dtype=torch.uint8)
    of.plane(planes, "d", 256).copy_(torch.tensor([1.0], dtype=torch.float16).view(torch.uint8))
    of.plane(planes, "sc", 256).fill_(1)
    for column in range(256):
        group, within = divmod(column, 16)
        for high in (1, 2, 3):
            q = of.plane(planes, "qh", 256).flatten()
            q.zero_()
            q[4 * group + within % 8 // 2] = high << (2 * (within % 2) + (0 if within >= 8 else 4))
            values = dequantise_gguf(planes, "Q6_K/planes", 256)[0] + 32
            assert values[column] == 16 * high and values.count_nonzero() == 1


def test_gguf_names_what_is_wrong():
    weight = packed("Q4_K")
    with pytest.raises(ValueError, match="kind: expected Q4_0, .*Q6_K.*not 'IQ2_XS'"):
        linear_gguf(randn(2, 768), weight, "IQ2_XS")
    with pytest.raises(ValueError, match="x: expected a multiple of 256 columns, the block of Q4_K, not 700"):
        linear_gguf(randn(2, 700), weight, "Q4_K")
    with pytest.raises(ValueError, match=r"weight: expected uint8 \[outputs, 144\], 256 columns in Q4_K, not uint8 \["):
        linear_gguf(randn(2, 256), weight, "Q4_K")
    with pytest.raises(ValueError, match=r"weight: expected uint8 \[outputs, a multiple of 34 bytes\]"):
        gguf_planes(weight[:, :33], "Q8_0")
    with pytest.raises(ValueError, match="kind: expected the form of a file, such as 'Q4_K', not 'Q4_K/planes'"):
        gguf_planes(*gguf_planes(weight, "Q4_K"))
