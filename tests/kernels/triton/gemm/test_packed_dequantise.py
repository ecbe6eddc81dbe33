"""`dequantised`: packed weights as plain numbers, read a word or a weight at a time."""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.ops.linear_int4 import dequantise_affine, unpack_int4
from nanovllm.kernels.triton.gemm.packed_dequantise import dequantised
from tests.kernels.triton.common import DEVICE, randn

pytestmark = pytest.mark.triton


def drawn(rows, columns):
    return torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(rows)).byte().to(DEVICE)


@pytest.mark.parametrize("bits, rows, size, group", [
    (4, 37, 640, 128), (4, 16, 256, 256), (4, 3, 96, 6), (4, 5, 80, 16), (8, 37, 640, 128), (8, 3, 36, 6),
])  # fmt: skip
@pytest.mark.parametrize("dtype, zeros, shifted", [(torch.bfloat16, False, True), (torch.float32, True, False)])
def test_integers(dtype, zeros, shifted, bits, rows, size, group, poison):
    """shifted: the weight begins where no word does."""
    whole = drawn(rows, size * bits // 8 + shifted)
    weight, middle = whole[:, int(shifted) :], 1 << bits - 1
    scale = randn(rows, size // group, dtype=torch.float32, scale=0.1)
    zero = drawn(rows, size // group) & (2 * middle - 1) if zeros else middle
    got = dequantised(weight, size, dtype, scale, bits=bits, zero=zero, d_columns=group, part=group)
    want = dequantise_affine(unpack_int4(weight) if bits == 4 else weight, scale, zero)
    assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("rows, size", [(130, 384), (5, 200)])
def test_floats(rows, size, poison):
    weight = randn(rows, size, dtype=torch.float32, scale=50.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = randn(-(-rows // 128), -(-size // 128), dtype=torch.float32)
    got = dequantised(
        weight.view(torch.uint8), size, torch.bfloat16, scale, bits=8, floats=True, d_rows=128, d_columns=128
    )
    assert torch.equal(got, dequantise_fp8(weight, scale).bfloat16())
