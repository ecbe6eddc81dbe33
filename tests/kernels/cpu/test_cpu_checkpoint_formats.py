"""Packed matrices from the tensors of quantised checkpoints: every kind of scale, shape and mistake."""

import pytest
import torch

from nanovllm.kernels.cpu.build import cpu_support

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

from nanovllm.kernels.cpu.library import PackedMatrix
from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.ops.linear_int4 import dequantise_affine, pack_int4


def check(packed, weight, count, tolerance=1e-6):
    assert (packed.rows, packed.columns) == tuple(weight.shape) and packed.is_finite()
    x = torch.randn(count, packed.columns)
    got, want = packed.product(x).double(), x.double() @ weight.double().T
    assert (got - want).norm() <= tolerance * want.norm() + 1e-30
    ids = torch.randint(0, packed.rows, (5,))
    torch.testing.assert_close(packed.take(ids), weight[ids], rtol=1e-6, atol=1e-6 * weight.abs().max().item())


def int4(rows, columns, group, dtype, zero):
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // group) + 0.5).to(dtype)
    z = torch.randint(0, 16, (rows, columns // group), dtype=torch.uint8) if zero else None
    return PackedMatrix.of_int4(pack_int4(values), scale, z), dequantise_affine(values, scale, 8 if z is None else z)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    "rows, columns, group, bits",
    [(16, 128, 128, 4.5), (37, 384, 128, 4.5), (5, 96, 32, 6), (50, 192, 64, 6), (33, 512, 512, 4.5), (1, 160, 160, 6)],
)
def test_int4(rows, columns, group, bits, zero, dtype):
    torch.manual_seed(rows)
    for count in (1, 3, 20):
        packed, weight = int4(rows, columns, group, dtype, zero)
        check(packed, weight, count)
    assert packed.nbytes == -(-rows // 16) * 16 * columns * bits / 8


def test_int4_of_extreme_scales():
    values = torch.arange(16, dtype=torch.uint8).repeat(16, 4)
    scale = torch.tensor([0.0, 1e-30, 1.0, 1e30]).repeat(4)[:, None]
    packed = PackedMatrix.of_int4(pack_int4(values), scale.expand(16, 2).contiguous())
    weight = dequantise_affine(values, scale, 8)
    got = packed.product(torch.eye(64))
    for row in range(4):
        torch.testing.assert_close(got[:, row], weight[row], rtol=1e-6, atol=8e-6 * scale[row].item())
    scale[3] = torch.inf
    assert not PackedMatrix.of_int4(pack_int4(values), scale).is_finite()


SCALES = {
    "tensor": lambda n, k: torch.rand(()) + 0.5, "tensor of [1]": lambda n, k: torch.rand(1) + 0.5,
    "rows": lambda n, k: torch.rand(n) + 0.5, "column of rows": lambda n, k: torch.rand(n, 1) + 0.5,
    "blocks": lambda n, k: torch.rand(-(-n // 128), -(-k // 128)) + 0.5,
    "blocks of each row": lambda n, k: torch.rand(n, -(-k // 128)) + 0.5,
    "bfloat16": lambda n, k: (torch.rand(-(-n // 128), -(-k // 128)) + 0.5).bfloat16(),
}  # fmt: skip


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("rows, columns", [(16, 128), (37, 300), (130, 257), (1, 1), (260, 40)])
def test_fp8(rows, columns, scales):
    torch.manual_seed(columns)
    values = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = scales(rows, columns)
    two_dims = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    weight = dequantise_fp8(values, two_dims)
    for count in (1, 2, 9, 40):
        check(PackedMatrix.of_fp8(values, scale), weight, count)
    bits = PackedMatrix.of_fp8(values.view(torch.uint8), scale)
    assert torch.equal(bits.tiles, PackedMatrix.of_fp8(values, scale).tiles)


def test_every_fp8_number():
    values = torch.arange(256, dtype=torch.uint8).repeat(16, 1).view(torch.float8_e4m3fn)
    values.view(torch.uint8)[:, [0x7F, 0xFF]] = 0
    for scale in (1.0, 3.0, 1e-38, 1e-3):
        got = PackedMatrix.of_fp8(values, torch.tensor(scale)).take(torch.arange(16))
        assert torch.equal(got, values.float() * scale)


def test_what_is_not_finite_is_found():
    values = torch.randn(40, 300).to(torch.float8_e4m3fn)
    scale = torch.ones(40, 3)
    assert PackedMatrix.of_fp8(values, scale).is_finite()
    for place in ((0, 0), (39, 299), (17, 128)):
        for bits in (0x7F, 0xFF):
            wrong = values.clone()
            wrong.view(torch.uint8)[place] = bits
            packed = PackedMatrix.of_fp8(wrong, scale)
            assert not packed.is_finite()
            assert packed.product(torch.ones(1, 300)).isnan().nonzero().tolist() == [[0, place[0]]]
    for value in (torch.inf, torch.nan):
        scale[20, 2] = value
        assert not PackedMatrix.of_fp8(values, scale).is_finite()


def test_mistakes_are_named():
    weight = torch.zeros(8, 48, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="int4: groups of 24 columns; the C.. kernels take multiples of 32; dequantise"
    ):
        PackedMatrix.of_int4(weight, torch.ones(8, 4))
    with pytest.raises(ValueError, match="scale: 5 groups do not divide 96 columns"):
        PackedMatrix.of_int4(weight, torch.ones(8, 5))
    for scale, zero in ((torch.ones(7, 3), None), (torch.ones(3), None), (torch.ones(8, 3), weight[:, :2])):
        with pytest.raises(ValueError, match=r"int4: expected a scale and a zero \[rows, groups\]"):
            PackedMatrix.of_int4(weight, scale, zero)
    with pytest.raises(ValueError, match=r"scale: expected \[1, 8 or 1, 1 or 1\]"):
        PackedMatrix.of_fp8(weight, torch.ones(8, 2))
