"""Products of packed matrices: every storage format against its dequantised weights in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.cpu.build import cpu_support

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)
gguf = pytest.importorskip("gguf")

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.library import FORMATS, GGUF_FORMATS, PLAIN, PackedMatrix, can_round
from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.ops.linear_int4 import dequantise_affine, pack_int4
from nanovllm.weights.gguf import block_size

# Where a block of each quantised format holds its halves.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}  # fmt: skip
DTYPES = {name: dtype for dtype, name in PLAIN.items()}


def random_matrix(format, rows, columns, seed=0, activations="float32"):
    """(packed, the same weights in float32): blocks of random bits, with finite scales."""
    rng = np.random.default_rng(seed)
    if format in DTYPES:
        weight = torch.from_numpy(rng.standard_normal((rows, columns), np.float32)).to(DTYPES[format])
        return PackedMatrix.of(weight, activations), weight.float()
    if format == "E4M3":
        values = torch.from_numpy(rng.integers(0, 127, (rows, columns), dtype=np.uint8))
        values |= torch.from_numpy(rng.integers(0, 2, (rows, columns), dtype=np.uint8)) << 7
        scale = torch.from_numpy(rng.standard_normal((-(-rows // 128), -(-columns // 128)), np.float32))
        values = values.view(torch.float8_e4m3fn)
        return PackedMatrix.of_fp8(values, scale), dequantise_fp8(values, scale)
    if format.startswith("INT4"):
        groups = columns // (64 if format == "INT4_32" else 128)
        values, zero = (
            torch.from_numpy(rng.integers(0, 16, (rows, n), dtype=np.uint8)) for n in (columns, groups)
        )  # fmt: skip
        scale = torch.from_numpy(rng.standard_normal((rows, groups), np.float32))
        packed = PackedMatrix.of_int4(pack_int4(values), scale, zero, activations)
        assert packed.format == format
        return packed, dequantise_affine(values, scale, zero)
    width, size = block_size(format)
    blocks = rng.integers(0, 256, (rows, columns // width, size), dtype=np.uint8)
    for at in HALVES[format]:
        halves = rng.standard_normal((rows, columns // width)).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    weight = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format]).reshape(rows, columns)
    return PackedMatrix(format, torch.from_numpy(blocks), columns, activations), torch.from_numpy(weight)


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "rows, columns, count", [(16, 256, 1), (37, 512, 2), (70, 256, 7), (100, 768, 17), (100, 1280, 47)]
)
def test_products_are_those_of_the_dequantised_weights(format, rows, columns, count):
    packed, weight = random_matrix(format, rows, columns, seed=rows)
    x = torch.randn(count, columns)
    assert relative_error(packed.product(x), x.double() @ weight.double().T) < 1e-6
    x = torch.randn(count, 2 * columns)[:, ::2]  # not contiguous
    assert relative_error(packed.product(x), x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_no_token_has_no_products(format, activations):
    """As of the LM head in a step that ends no prompt."""
    packed, _ = random_matrix(format, 100, 1280, activations=activations)
    assert packed.product(torch.empty(0, 1280)).shape == (0, 100)


def test_matrices_of_which_a_cache_holds_some_rows():
    packed, weight = random_matrix("F32", 600, 3072)
    x = torch.randn(47, 3072)
    # The error of a float32 sum grows with the root of its length; 1e-6 is the bound of 1,280 columns.
    assert relative_error(packed.product(x), x.double() @ weight.double().T) < 1e-6 * (3072 / 1280) ** 0.5


@pytest.mark.parametrize("format", [*sorted(HALVES), "INT4_32", "INT4_128"])
@pytest.mark.parametrize("count", [7, 17, 40])
def test_long_sums_of_quantised_weights_are_more_exact_than_one_float32_for_all_columns(format, count):
    packed, weight = random_matrix(format, 50, 4096)
    x = torch.randn(count, 4096)
    # One float32 that takes all products is off by 1.1e-6, torch's product by 2.6e-7.
    assert relative_error(packed.product(x), x.double() @ weight.double().T) < 5e-7


@pytest.mark.parametrize("format", [*sorted(HALVES), "INT4_32", "INT4_128"])
def test_int8_activations_round_to_a_127th_of_their_group(format):
    packed, weight = random_matrix(format, 37, 512, activations="int8")
    x = torch.randn(9, 512)
    groups = x.view(9, -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    rounded = (groups / step).round().mul(step).view(9, -1)
    assert relative_error(packed.product(x), rounded.double() @ weight.double().T) < 1e-3  # ties may go either way
    assert relative_error(packed.product(x), x.double() @ weight.double().T) > 1e-3


@pytest.mark.parametrize("format", [*sorted(HALVES), "INT4_32", "INT4_128"])
def test_many_tokens_are_as_exact_as_few_with_int8_activations(format):
    """With AMX they are multiplied in another way."""
    packed, weight = random_matrix(format, 37, 768, activations="int8")
    x = torch.randn(77, 768)
    want = x.double() @ weight.double().T
    few = torch.cat([packed.product(part) for part in x.split(8)])
    assert 1e-4 < relative_error(packed.product(x), want) < 1.05 * relative_error(few, want)


def test_bfloat16_weights_are_multiplied_with_activations_that_are_rounded_to_bfloat16():
    if not can_round():
        with pytest.raises(ValueError, match="cpu_activations='bfloat16': .* AVX512_BF16"):
            random_matrix("BF16", 37, 512, activations="bfloat16")
        return
    for rows, columns in ((37, 512), (100, 1280), (70, 200)):
        packed, weight = random_matrix("BF16", rows, columns, activations="bfloat16")
        for count in (4, 5, 8, 31, 47):
            x = torch.randn(count, columns)
            rounded, exact = ((of.double() @ weight.double().T) for of in (x.bfloat16(), x))
            near, far = (exact, rounded) if count < 5 else (rounded, exact)
            got = packed.product(x)
            assert relative_error(got, near) < 1e-6 < 1e-4 < relative_error(got, far), (rows, columns, count)


@pytest.mark.parametrize(
    "features, arch, words",
    [
        ("flags : fma avx512_bf16", "x86-64-v3", "NANOVLLM_CPU_ARCH='x86-64-v3' .*AVX512_BF16.*; unset it"),
        ("flags : fma avx512_bf16", None, "the C.* kernels were built without .*AVX512_BF16.*; install GCC"),
        ("flags : fma avx512f", "native", "this processor lacks .*AVX512_BF16.*; use 'float32'"),
        ("arm64", None, "this processor lacks .*AVX512_BF16.*; use 'float32'"),
    ],
)  # fmt: skip
def test_libraries_without_products_of_bfloat16_say_why(monkeypatch, features, arch, words):
    monkeypatch.setattr(library, "can_round", lambda: False)
    monkeypatch.setattr(library, "cpu_features", lambda: features)
    monkeypatch.delenv("NANOVLLM_CPU_ARCH", raising=False)
    if arch:
        monkeypatch.setenv("NANOVLLM_CPU_ARCH", arch)
    with pytest.raises(ValueError, match=f"cpu_activations='bfloat16': {words}"):
        random_matrix("BF16", 16, 32, activations="bfloat16")
    random_matrix("Q8_0", 16, 32, activations="bfloat16")  # has no such products


def test_only_bfloat16_weights_take_rounded_activations():
    for format in ("F32", "F16", "Q4_1", "E4M3"):
        packed, weight = random_matrix(format, 37, 512, activations="bfloat16")
        x = torch.randn(31, 512)
        assert relative_error(packed.product(x), x.double() @ weight.double().T) < 1e-6, format


@pytest.mark.parametrize("format", HALVES)
def test_the_largest_codes_and_activations_fit_in_integers(format):
    """Weights of one bit pattern each, and activations whose three parts are all at an end of their range."""
    width, size = block_size(format)
    blocks = np.empty((16, 512 // width, size), np.uint8)
    for row, byte in enumerate([0x00, 0x7F, 0x80, 0xFF] * 4):
        blocks[row] = byte
    for at in HALVES[format]:
        blocks[:, :, at : at + 2] = np.float16([1.5]).view(np.uint8)
    blocks = blocks.reshape(16, -1)
    weight = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format]).reshape(16, 512))
    packed = PackedMatrix(format, torch.from_numpy(blocks), 512)
    parts = [(a, b, c) for a in (-128, 0, 127) for b in (-128, 0, 127) for c in (-126, 126)]
    x = torch.tensor([[a + 256 * b + 65536 * c] for a, b, c in parts], dtype=torch.float32).repeat(1, 512)
    x[:, ::32] = 127 * 65536  # the largest of its 32, which is the scale
    assert relative_error(packed.product(x), x.double() @ weight.double().T) < 1e-6


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_activations_that_are_not_finite_stay_so(value):
    for format, activations, count in (
        ("Q4_1", "float32", 2), ("Q4_1", "int8", 2), ("Q4_1", "int8", 40), ("BF16", "float32", 40),
        *[("BF16", "bfloat16", 40)] * can_round(),
    ):  # fmt: skip
        packed, _ = random_matrix(format, 16, 256, activations=activations)
        x = torch.randn(count, 256)
        x[1, 200] = value
        finite = packed.product(x).isfinite()
        assert finite[0].all() and not finite[1].any() and finite[2:].all(), (format, activations, count)


@pytest.mark.parametrize(
    "format, columns", [("F32", 77), ("BF16", 200), ("BF16", 1000), ("E4M3", 77), ("Q4_1", 96), ("INT4_128", 128)]
)
@pytest.mark.parametrize("count", [1, 9, 40])
def test_padding_holds_nothing_of_the_product_before(format, columns, count):
    """Rows of activations have the same memory."""
    before, _ = random_matrix(format, 16, 256)
    packed, weight = random_matrix(format, 16, columns)
    x = torch.randn(count, columns)
    before.product(torch.full((count, 256), torch.nan))
    assert relative_error(packed.product(x), x.double() @ weight.double().T) < 1e-6


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(DTYPES)), st.integers(1, 50), st.integers(1, 300), st.integers(0, 70))
def test_plain_matrices_have_any_size(format, rows, columns, count):
    packed, weight = random_matrix(format, rows, columns, seed=columns)
    x = torch.randn(count, columns)
    got, want = packed.product(x), x.double() @ weight.double().T
    assert got.shape == (count, rows) and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_has_the_same_result_in_every_batch_of_few_and_of_many(format):
    packed, _ = random_matrix(format, 53, 512)
    x = torch.randn(16, 512)
    every = packed.product(x)
    for count in (*range(1, 10), 12, 15):
        assert torch.equal(packed.product(x[:count]), every[:count]), count
    x = torch.randn(64, 512)  # with AMX these are multiplied in another way
    every = packed.product(x)
    for count in (32, 33, 36, 40, 63):
        assert torch.equal(packed.product(x[:count]), every[:count]), count


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_the_dequantised_ones(format):
    packed, weight = random_matrix(format, 45, 512)
    ids = torch.tensor([44, 0, 17, 17, 31, 16])
    torch.testing.assert_close(packed.take(ids), weight[ids], rtol=1e-6, atol=1e-6)
    assert packed.take(ids[:0]).shape == (0, 512)


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_a_packed_matrix_is_about_as_large_as_in_the_file(format):
    width, size = (1, DTYPES[format].itemsize) if format in DTYPES else block_size(format)
    packed, _ = random_matrix(format, 64, 1024)
    # Scales of six bits take eight.
    assert 1 <= packed.nbytes / (64 * 1024 // width * size) < 1.05


@pytest.mark.parametrize("format", GGUF_FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found(format, value):
    packed, weight = random_matrix(format, 20, 512)
    assert packed.is_finite()
    if format in DTYPES:
        weight = weight.to(DTYPES[format])
        weight[19, 511] = value
        assert not PackedMatrix.of(weight).is_finite()
        return
    width, size = block_size(format)
    blocks = np.zeros((20, 512 // width, size), np.uint8)
    at = HALVES[format][-1]
    blocks[19, -1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    if format in ("Q4_K", "Q5_K"):
        blocks[:, :, 4:16] = 255  # a scale of zero hides nothing
    if format == "Q6_K":
        blocks[:, :, 192:208] = 1
    assert not PackedMatrix(format, torch.from_numpy(blocks.reshape(20, -1)), 512).is_finite()


def test_subnormal_and_largest_scales():
    blocks = np.zeros((16, 2, 18), np.uint8)
    blocks[:, 0, :2] = np.array([6e-8], np.float16).view(np.uint8)
    blocks[:, 1, :2] = np.array([65504], np.float16).view(np.uint8)
    blocks[:, :, 2:] = 0xF3
    blocks = blocks.reshape(16, -1)
    weight = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)).double()
    got = PackedMatrix("Q4_0", torch.from_numpy(blocks), 64).product(torch.eye(64)).double()
    torch.testing.assert_close(got, weight.T.contiguous(), rtol=1e-6, atol=0)
