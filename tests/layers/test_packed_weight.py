"""Packed weights: what is cut, joined and multiplied are the numbers that the whole stands for."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES
from nanovllm.layers.packed_weight import PackedWeight, bytes_and_weights
from nanovllm.layers.stored_matrices import FloatMatrix, Fp8Matrix, GGUFMatrix, IntMatrix
from tests.native import NATIVE

ROWS, COLUMNS = 256, 512


def fp8(rows, columns, height, width):
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    shape = [-(-n // size) if size else 1 for n, size in ((rows, height), (columns, width))]
    return Fp8Matrix(weight, torch.rand(*shape) + 0.5)


def integers(rows, columns, bits, group, zero=True, permuted=False):
    groups = (rows, columns // group if group else 1)
    return IntMatrix(
        torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8),
        torch.rand(*groups).half(),
        torch.randint(0, 2**bits, groups, dtype=torch.uint8) if zero else None,
        bits,
        torch.randperm(columns) if permuted else None,
    )


def blocks(rows, columns, kind="Q8_0"):
    form = GGUF_TYPES[kind]
    raw = torch.randint(0, 60, (rows, form.row_bytes(columns)), dtype=torch.uint8)
    return GGUFMatrix(raw, kind, columns)


MATRICES = {
    "floats": lambda rows=ROWS: FloatMatrix(torch.randn(rows, COLUMNS)),
    "fp8 blocks": lambda rows=ROWS: fp8(rows, COLUMNS, 128, 128),
    "fp8 rows": lambda rows=ROWS: fp8(rows, COLUMNS, 1, 0),
    "fp8 matrix": lambda rows=ROWS: fp8(rows, COLUMNS, 0, 0),
    "fp8 rows of blocks": lambda rows=ROWS: fp8(rows, COLUMNS, 1, 128),
    "int4": lambda rows=ROWS: integers(rows, COLUMNS, 4, 64),
    "int4 symmetric": lambda rows=ROWS: integers(rows, COLUMNS, 4, 128, zero=False),
    "int4 permuted": lambda rows=ROWS: integers(rows, COLUMNS, 4, 128, permuted=True),
    "int8 rows": lambda rows=ROWS: integers(rows, COLUMNS, 8, 0, zero=False),
    "Q8_0": lambda rows=ROWS: blocks(rows, COLUMNS),
    "Q6_K planes": lambda rows=ROWS: blocks(rows, COLUMNS, "Q6_K").as_planes(),
}


@pytest.mark.parametrize("name", MATRICES)
def test_rows(name):
    matrix = MATRICES[name]()
    whole = matrix.dequantised()
    assert matrix.shape == tuple(whole.shape) == (ROWS, COLUMNS)
    index = torch.tensor([3, 200, 3, 0])
    assert torch.equal(matrix.take_rows(index).dequantised(), whole[index])
    for start, length in ((0, ROWS), (128, 128), (0, 128), (100, 60), (7, 1)):
        assert torch.equal(matrix.rows(start, length).dequantised(), whole[start : start + length])
    padded = matrix.padded(ROWS + 5).dequantised()
    assert torch.equal(padded[:ROWS], whole) and (padded[ROWS:] == 0).all() and len(padded) == ROWS + 5


def test_aligned_rows_keep_their_blocks():
    matrix = MATRICES["fp8 blocks"]()
    assert matrix.rows(128, 128).scale.shape == (1, 4) and matrix.rows(64, 128).scale.shape == (128, 4)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("start, length", [(0, COLUMNS), (256, 256), (128, 128), (64, 192), (32, 96), (3, 5)])
def test_columns(name, start, length):
    """Either the same numbers, or none where a block would be cut."""
    matrix = MATRICES[name]()
    cut = matrix.columns(start, length)
    unit = {"fp8 blocks": 128, "fp8 rows of blocks": 128, "int4": 64, "int4 symmetric": 128, "Q8_0": 32}.get(name, 1)
    whole_only = name in ("int4 permuted", "Q6_K planes")
    possible = not (start % unit or length % unit) and not (whole_only and length < COLUMNS)
    assert (cut is not None) == possible
    if cut is not None:
        assert torch.equal(cut.dequantised(), matrix.dequantised()[:, start : start + length])


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("heights", [(128, 256, 128), (96, 32, 7)])
def test_matrices_of_one_form_become_one(name, heights):
    parts = [MATRICES[name](rows) for rows in heights]
    if name == "int4 permuted":
        parts = [IntMatrix(p.weight, p.scale, p.zero, 4, parts[0].permutation) for p in parts]
    weight = PackedWeight(parts, torch.float32, NATIVE)
    assert len(weight.matrices) == 1
    assert torch.equal(weight.dequantised(), torch.cat([p.dequantised() for p in parts]))


def test_scales_of_blocks_stay_so_where_heights_allow_it():
    weight = PackedWeight([MATRICES["fp8 blocks"](128), MATRICES["fp8 blocks"](300)], torch.float32, NATIVE)
    assert weight.matrices[0].scale.shape == (4, 4)
    weight = PackedWeight([MATRICES["fp8 matrix"](256), MATRICES["fp8 matrix"](256)], torch.float32, NATIVE)
    assert weight.matrices[0].scale.shape == (512, 1)


def test_zero_points_that_are_not_stored_join_those_that_are():
    parts = [MATRICES["int4"](32), replace(MATRICES["int4"](32), zero=None)]
    weight = PackedWeight(parts, torch.float32, NATIVE)
    assert len(weight.matrices) == 1
    assert torch.equal(weight.dequantised(), torch.cat([p.dequantised() for p in parts]))


def test_different_permutations_stay_apart():
    weight = PackedWeight([MATRICES["int4 permuted"](32), MATRICES["int4 permuted"](32)], torch.float32, NATIVE)
    assert len(weight.matrices) == 2


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_all_forms_below_each_other(with_bias):
    parts = [make(48) for make in MATRICES.values()]
    weight = PackedWeight(parts, torch.float32, NATIVE)
    assert len(weight.matrices) == len(parts) - 1  # two kinds of fp8 scales become one
    assert weight.shape == (48 * len(parts), COLUMNS) and weight.numel() == 48 * len(parts) * COLUMNS
    x = torch.randn(2, 3, COLUMNS)
    bias = torch.randn(48 * len(parts)) if with_bias else None
    want = F.linear(x.double(), weight.dequantised().double(), None if bias is None else bias.double())
    assert torch.allclose(weight(x, bias).double(), want, rtol=1e-4, atol=1e-4 * want.abs().max())
    nbytes, weights = bytes_and_weights(torch.nn.Sequential(weight, torch.nn.Linear(4, 2, bias=False)))
    assert nbytes == sum(p.nbytes for p in parts[:1]) + sum(m.nbytes for m in weight.matrices[1:]) + 32
    assert weights == weight.numel() + 8


@pytest.mark.parametrize("planes", [False, True])
def test_two_kinds_of_blocks_are_one_call(planes):
    """As q and k in Q4_K above v in Q6_K: the rows keep their order, and the bias its rows."""
    matrices = [blocks(48, COLUMNS, "Q4_K"), blocks(16, COLUMNS, "Q4_K"), blocks(24, COLUMNS, "Q6_K")]
    if planes:
        matrices = [matrix.as_planes() for matrix in matrices]
    calls = []

    class Counted:
        def __getattr__(self, name):
            value = getattr(NATIVE, name)
            return (lambda *args: calls.append(len(args)) or value(*args)) if name == "linear_gguf" else value

    weight = PackedWeight(matrices, torch.float32, Counted())
    assert [m.shape[0] for m in weight.matrices] == [64, 24]
    x, bias = torch.randn(3, COLUMNS), torch.randn(88)
    whole = torch.cat([m.dequantised() for m in matrices])
    torch.testing.assert_close(weight(x), F.linear(x, whole), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(weight(x, bias), F.linear(x, whole, bias), rtol=1e-4, atol=1e-2)
    assert calls == [6, 6]
