"""The Triton kernels of the ops against float64 and against the references.

With a GPU they run there at real shapes, else in Triton's interpreter on small ones. The interpreter is chosen when Triton
is imported, by an environment variable, so it gets a process of its own: `test_in_the_interpreter`.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
RUNS_HERE = INTERPRETED or torch.cuda.is_available()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

import triton.language as tl

import nanovllm.kernels.triton.rows as ops
from nanovllm.hardware.probe_kernels import CopyPlan, copy, copy_plans
from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import DROPOUT_ROUNDS, dropout_counts
from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import (
    layernorm_residual_dropout_gelu as native_chain,
)
from nanovllm.kernels.ops.activation import silu_and_mul as native_silu_and_mul
from nanovllm.kernels.ops.norm import add_rms_norm as native_add_rms_norm
from nanovllm.kernels.ops.norm import rms_norm as native_rms_norm
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope as native_qk_norm_rope
from nanovllm.kernels.ops.rotary import rotary_embedding as native_rotary_embedding
from nanovllm.kernels.ops.sample import philox
from tests.interpreter import check_interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
KINDS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
}
# Sizes that are no power of two, one element, one more than a block, and rows too long for registers.
SHAPES = [(1, 1), (3, 96), (0, 64), (2, 3, 130), (7, 33), (2, 1024), (1, 1025), (2, 33000)]
if DEVICE == "cuda":
    SHAPES += [(1, 1024), (256, 4096), (64, 5120), (2048, 2560), (3, 151936)]


def randn(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)


def close(got, expected, dtype, slack=1.0):
    assert got.dtype == dtype and got.shape == expected.shape
    tolerance = RELATIVE[dtype] * slack
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def like(got, native):
    """Equal but for the last bit of a few: reductions may add in another order."""
    assert got.dtype == native.dtype and got.shape == native.shape
    if got.numel():
        tolerance = 4 * RELATIVE[got.dtype]
        torch.testing.assert_close(got.double(), native.double(), rtol=tolerance, atol=tolerance)
        different = (got != native).double().mean().item()
        assert got.dtype == torch.float32 or different < 0.01 or got.numel() < 2000, f"{different:.1%} differ"


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that a kernel gets is NaN (integers: a large number), and what follows it must stay so."""
    original, allocated = torch.empty, []

    def poisoned(*size, dtype=torch.float32, device=None, **kwargs):
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        memory = original(shape.numel() + 64, dtype=dtype, device=device, **kwargs).fill_(value)
        allocated.append(memory)
        return memory[: shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for memory in allocated:
        guard = memory[-64:]
        assert (guard.isnan() if guard.is_floating_point() else guard == torch.iinfo(guard.dtype).max).all(), (
            "wrote past the end"
        )


def strided(x):
    """x with other elements between its rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), 7.0, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def rms_norm_64(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


# -------------------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(shape, dtype):
    x, weight = randn(*shape, dtype=dtype, scale=3), randn(shape[-1], dtype=dtype, seed=1)
    for given in (x, strided(x)):
        before = given.clone()
        y = ops.rms_norm(given, weight, 1e-6)
        close(y, rms_norm_64(x, weight), dtype)
        like(y, native_rms_norm.native(x, weight, 1e-6))
        assert torch.equal(given, before) and y.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_the_heads_of_a_fused_projection(dtype):
    for tokens in (1, 5, 300 if DEVICE == "cuda" else 9):
        qkv = randn(tokens, 7, 128, dtype=dtype, seed=tokens)
        weight = randn(128, dtype=dtype, seed=1)
        for view in qkv.split((4, 2, 1), dim=1):
            close(ops.rms_norm(view, weight, 1e-6), rms_norm_64(view, weight), dtype)


def test_rms_norm_does_not_overflow():
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=DEVICE)
    assert torch.equal(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(shape, dtype):
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    weight = randn(shape[-1], dtype=dtype, seed=2)
    native_y, native_sum = native_add_rms_norm.native(x, residual, weight, 1e-6)
    given = x.clone(), residual.clone()
    y, total = ops.add_rms_norm(*given, weight, 1e-6)
    assert torch.equal(total, native_sum)
    like(y, native_y)
    close(y, rms_norm_64(total, weight), dtype)
    if x.numel():
        assert (y.data_ptr(), total.data_ptr()) == tuple(t.data_ptr() for t in given)  # in place
    apart = strided(x), strided(residual)
    y, total = ops.add_rms_norm(*apart, weight, 1e-6)
    assert torch.equal(total, native_sum)
    assert apart[0].is_contiguous() or (torch.equal(apart[0], x) and torch.equal(apart[1], residual))
    like(y, native_y)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(shape, dtype):
    x = randn(*shape, dtype=dtype) + 5
    weight, bias = randn(shape[-1], dtype=dtype, seed=1), randn(shape[-1], dtype=dtype, seed=2)
    expected = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
    for given in (x, strided(x)):
        close(ops.layer_norm(given, weight, bias, 1e-5), expected, dtype, slack=3)


def test_rows_without_elements():
    x, none = randn(5, 0, dtype=torch.float32), randn(0, dtype=torch.float32)
    assert ops.layer_norm(x, none, none, 1e-5).shape == (5, 0)
    assert ops.layernorm_residual_dropout_gelu(x, x, none, none, p=0.5).shape == (5, 0)


def far_rows(size):
    """Rows whose mean is far from zero, or that begin with outliers: one, and so many that what a row is centred on is one."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    x[0] += 1e4
    x[1] = x[1] * 100 - 1e4
    x[2, 0] = 3e4
    x[3, :40] = 1e4
    x[4, -1] = -3e4
    return x


@pytest.mark.parametrize("size", [1024, 1280, 40] + ([1100, 5120, 20000] if DEVICE == "cuda" else []))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norms_of_rows_far_from_zero(dtype, size, monkeypatch):
    from nanovllm.kernels.triton.rows import layernorm_chain, norm

    x = far_rows(size).to(dtype).to(DEVICE)
    weight, bias = randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    for most_rows in (1 << 30, 0):
        for module in (norm, layernorm_chain):
            monkeypatch.setattr(module, "MANY_ROWS", most_rows)
        close(ops.layer_norm(x, weight, bias, 1e-5), expected, dtype, slack=3)
        y = ops.layernorm_residual_dropout_gelu(x, torch.zeros_like(x), weight, bias)
        # In float16 the first row is nearly constant; of many rows the chain has its mean in one number.
        rows = slice(1, None) if dtype == torch.float16 and not most_rows else slice(None)
        close(y[rows], F.gelu(expected[rows]), dtype, slack=6)


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """So few that long rows are not shared by programs."""
    monkeypatch.setattr(sys.modules["nanovllm.kernels.triton.rows.softmax"], "num_sms", lambda x: 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_long_rows_by_one_program_each(few_multiprocessors, dtype):
    test_softmax((2, 33000), dtype)
    test_softmax_of_infinities(40000)


def test_softmax_of_rows_in_large_parts(monkeypatch):
    monkeypatch.setattr(sys.modules["nanovllm.kernels.triton.rows.softmax"], "_FEW_ROWS", 0)
    test_softmax((2, 33000), torch.bfloat16)


def test_softmax_of_one_row_is_the_same_beside_others():
    x = randn(3, 40000, dtype=torch.float32)
    assert torch.equal(ops.softmax(x)[1:2], ops.softmax(x[1:2]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(shape, dtype):
    for scale in (1.0, 100.0):
        x = randn(*shape, dtype=dtype, scale=scale)
        for given in (x, strided(x)):
            got = ops.softmax(given)
            assert got.dtype == dtype
            # Relative to the value: most of a long row is far below any absolute tolerance.
            expected = torch.softmax(x.double(), -1)
            torch.testing.assert_close(
                got.double(), expected, rtol=RELATIVE[dtype] * (3 if scale > 1 else 1), atol=6e-8
            )


@pytest.mark.parametrize("size", [5, 40000])
def test_softmax_of_infinities(size):
    x = torch.full((4, size), -float("inf"), device=DEVICE)
    x[1, 3] = 2.0
    x[2, :] = 3e38
    x[3, 1::2] = 1.0
    torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layernorm_chain(dtype, approximate, p):
    for shape in [(3, 96), (2, 3, 130), (0, 8), (1, 1)] + ([(512, 4096)] if DEVICE == "cuda" else []):
        x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
        weight, bias = randn(shape[-1], dtype=dtype, seed=2), randn(shape[-1], dtype=dtype, seed=3)
        for seed in (0, -5, 2**63 + 11):
            args = (weight, bias, 1e-5, p, seed, approximate)
            y = ops.layernorm_residual_dropout_gelu(x, residual, *args)
            close(y, native_chain.native(x, residual, *args), dtype, slack=4)
            assert torch.equal(y, ops.layernorm_residual_dropout_gelu(strided(x), strided(residual), *args))
        if p == 0:
            normed = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
            close(y, F.gelu(normed + residual.double(), approximate=approximate), dtype, slack=6)


@pytest.fixture
def many(monkeypatch):
    """A few rows, elements or tokens count as many."""
    from nanovllm.kernels.triton.rows import activation, elementwise, layernorm_chain, norm, rotary

    for module, name in (
        (norm, "MANY_ROWS"), (layernorm_chain, "MANY_ROWS"), (activation, "_FEW_ELEMENTS"), (elementwise, "_FEW_ELEMENTS"),
        (rotary, "_MANY_TOKENS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 0)


@pytest.mark.parametrize(
    "size, pieces", [(1024, 2), (1280, 5), (1536, 3), (5120, 5), (7168, 7), (1100, 0), (2048, 0), (512, 0)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_many_rows(many, size, pieces, dtype):
    from nanovllm.kernels.triton.rows import norm

    cut = norm._cut(3, size, 1, None)
    assert (cut[0] if cut else 0) == pieces
    x = randn(3, size, dtype=dtype, scale=3) + 2
    weight, bias = randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    for given in (x, strided(x)):
        like(ops.rms_norm(given, weight, 1e-6), native_rms_norm.native(x, weight, 1e-6))
        close(ops.layer_norm(given, weight, bias, 1e-5), expected, dtype, slack=3)
    heads = randn(2, 5, size, dtype=dtype)[:, 1:4]
    like(ops.rms_norm(heads, weight, 1e-6), native_rms_norm.native(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_many_rows_keep_infinities_to_their_row(many, dtype):
    x, weight = randn(4, 1280, dtype=dtype), randn(1280, dtype=dtype, seed=1)
    x[1, 1279], x[2, 300] = float("inf"), float("nan")
    rms, layer = ops.rms_norm(x, weight, 1e-6), ops.layer_norm(x, weight, weight, 1e-6)
    assert rms[2].isnan().all() and layer[1:3].isnan().all() and rms[1].isnan().sum() == 1
    assert rms[::3].isfinite().all() and layer[::3].isfinite().all()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layernorm_chain_of_many_rows(many, dtype, p):
    for size in (1024, 1280, 130):
        x, residual = randn(3, size, dtype=dtype), randn(3, size, dtype=dtype, seed=1)
        args = (randn(size, dtype=dtype, seed=2), randn(size, dtype=dtype, seed=3), 1e-5, p, 2**40 + 3)
        y = ops.layernorm_residual_dropout_gelu(x, residual, *args)
        close(y, native_chain.native(x, residual, *args), dtype, slack=4)
        assert torch.equal(y, ops.layernorm_residual_dropout_gelu(strided(x), strided(residual), *args))


def kept_by_hand(rows, size, limit, seed):
    """Which elements dropout keeps, from one counter after the other."""
    zero, keep = torch.zeros(1, dtype=torch.int64), torch.empty(rows, size).bool()
    key = torch.tensor([(seed + 2**63) % 2**64 - 2**63])
    for row in range(rows):
        for column in range(size):
            words = philox(torch.tensor([column // 8]), torch.tensor([row]), zero, zero, key, DROPOUT_ROUNDS)
            half = int(words[column % 8 // 2]) >> 16 * (column % 2)
            keep[row, column] = half % 2**15 >= limit
    return keep


def test_dropout_mask_of_the_reference():
    for size, limit, seed in ((1, 16384, 0), (21, 13107, -5), (16, 30000, 2**63 + 11)):
        x, one = torch.randn(3, size), torch.ones(size)
        y = native_chain.native(x, x * 0 + 9, one, one, 1e-5, limit / 2**15, seed)
        assert torch.equal(y != 0, kept_by_hand(3, size, limit, seed))


# 0.984375 is above what is compared in pairs; 0.5 has a factor that bfloat16 holds; 0.96 is the first whose factor is split
# inexactly; the last and the first leave and drop one in 32768.
@pytest.mark.parametrize("p", [2**-15, 0.1, 0.5, 0.96, 0.984375, 1 - 2**-15], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_mask_is_the_references(dtype, p, monkeypatch):
    from nanovllm.kernels.triton.rows import layernorm_chain

    few, many = (1, 7, 130), (512,)
    if DEVICE == "cuda":
        few, many = [(1, 2, 7, 8, 33, 130, 512, 1024, 1100, 1280, 4096, 5120, 20000)] * 2
    for most_rows, sizes in ((1 << 30, few), (0, many)):
        monkeypatch.setattr(layernorm_chain, "MANY_ROWS", most_rows)
        for size in sizes:
            rows = 300 if DEVICE == "cuda" else 3
            x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
            residual = torch.full_like(x, 40)  # so that nothing but dropout gives 0
            args = (weight, weight, 1e-5, p, size * 2**33 + 1)
            got, native = (
                ops.layernorm_residual_dropout_gelu(x, residual, *args),
                native_chain.native(x, residual, *args),
            )
            assert torch.equal(got != 0, native != 0)
            close(got, native, dtype, slack=4)


def test_dropout_keeps_the_expectation():
    drops = {0.0: 0, 2**-17: 0, 2**-16: 0, 1.6e-5: 1, 0.1: 3277, 0.5: 16384, 1 - 2**-17: 32767, 1.0: 32768}
    for p, expected in drops.items():
        limit, factor = dropout_counts(p)
        assert limit == expected and (limit == 2**15 or factor * (1 - limit / 2**15) == pytest.approx(1, rel=1e-15))
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="^p: "):
            dropout_counts(p)
    x, weight = torch.full((64, 4096), 1.0), torch.zeros(4096)
    for p in (0.1, 0.7):
        y = native_chain.native(x, x + 8, weight, weight, 1e-5, p, 3)
        limit, factor = dropout_counts(p)
        assert ((y == 0) | (y == 9 * torch.tensor(factor))).all()
        assert (y == 0).double().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / y.numel()) ** 0.5)


def test_float16_compares_random_bits_as_integers_do():
    """What the kernel relies on where it compares two halves in one instruction."""
    from nanovllm.kernels.triton.rows.layernorm_chain import _MOST_PACKED

    halves = torch.arange(2**16)
    numbers = halves.to(torch.int16).view(torch.float16).abs()
    for limit in (1, 2, 1023, 1024, 3277, 16384, 31743, _MOST_PACKED):
        bound = torch.tensor([limit], dtype=torch.int16).view(torch.float16)
        assert torch.equal(~(numbers < bound), halves % 2**15 >= limit)


def test_factors_split_in_two_bfloat16():
    """Of every probability, all 128 significands: rounded twice as the kernel does, and once."""
    from nanovllm.kernels.triton.rows.layernorm_chain import _split

    scales = [2**15 / (2**15 - limit) for limit in range(1, 0x7C01, 7)]
    high, low = torch.tensor([_split(s) for s in scales], dtype=torch.float64).unbind(-1)
    v, factor = torch.arange(128, 256).double()[:, None], torch.tensor(scales)
    assert torch.equal(high.bfloat16().double(), high) and (low >= 0).all() and (low <= high / 128).all()
    once = (v.float() * factor).bfloat16()
    twice = (v * high + (v * low.bfloat16().double()).bfloat16().double()).bfloat16()
    different = once != twice
    assert different.any(0).double().mean() < 0.2 and different.sum(0).max() <= 5
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=0)


# -------------------------------------------------------------------------------------------------------- elementwise


def magnitudes(dtype):
    """Values of every magnitude that the dtype has, of both signs."""
    top = torch.finfo(dtype).max
    values = torch.logspace(-6, 38, 89, dtype=torch.float64).clamp(max=top)
    values = torch.cat((values, torch.linspace(0, 30, 120, dtype=torch.float64)))
    return torch.cat((values, -values)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_activation(kind, dtype):
    for x in (
        magnitudes(dtype),
        randn(5, 1000, dtype=dtype),
        randn(0, dtype=dtype),
        strided(randn(5, 33, dtype=dtype)),
    ):
        y = ops.fused_activation(x, kind)
        close(y, KINDS[kind](x.double()), dtype)
        if kind != "relu":
            assert y.isfinite().all()
    nan = torch.full((3,), float("nan"), dtype=dtype, device=DEVICE)
    assert ops.fused_activation(nan, kind).isnan().all()


@pytest.mark.parametrize("shape", [(1, 2), (3, 96), (0, 64), (2, 3, 130), (5, 6146)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_of_a_fused_gate_up(shape, dtype):
    x = randn(*shape, dtype=dtype, scale=4)
    gate, up = x.double().chunk(2, -1)
    for given in (x, strided(x)):
        close(ops.silu_and_mul(given), F.silu(gate) * up, dtype, slack=2)
        for approximate in ("none", "tanh"):
            close(ops.gelu_and_mul(given, approximate), F.gelu(gate, approximate=approximate) * up, dtype, slack=2)
    like(ops.silu_and_mul(x), native_silu_and_mul.native(x))


@pytest.mark.parametrize("size", [512, 1536, 6146], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise_ops_of_many_elements(many, size, dtype):
    x, bias = randn(3, 2 * size, dtype=dtype, scale=4), randn(2 * size, dtype=dtype, seed=1)
    gate, up = x.double().chunk(2, -1)
    for given in (x, strided(x)):
        close(ops.silu_and_mul(given), F.silu(gate) * up, dtype, slack=2)
        for approximate in ("none", "tanh"):
            close(ops.gelu_and_mul(given, approximate), F.gelu(gate, approximate=approximate) * up, dtype, slack=2)
            for other in (bias, x):
                expected = F.gelu((x + other).double(), approximate=approximate)
                close(ops.fused_add_gelu(given, other, approximate), expected, dtype)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_float32_activations_to_a_few_units_in_the_last_place(kind):
    """Relative, also in the tails; where e^z is below the smallest normal number they may be 0."""
    x = torch.cat((magnitudes(torch.float32), torch.linspace(-100, 100, 20001).to(DEVICE)))
    x = x[x.abs() < 1e12]  # beyond it x^3 overflows in float32, and z is infinite
    y, wide = ops.fused_activation(x, kind).double(), x.double()
    # (torch's gelu adds 1 and a tanh near -1.)
    z = wide if kind == "silu" else 1.5957691216057308 * (wide + 0.044715 * wide**3)
    expected = wide * torch.sigmoid(z)
    error = (y - expected).abs() / expected.abs().clamp(min=1e-30)
    allowed = 1e-6 + 2e-7 * z.clamp(-90, 0).abs()  # z's own roundings: an absolute error of z is a relative one of e^z
    worst = (error / allowed).argmax()
    assert error[worst] <= allowed[worst], f"{float(error[worst])} at {float(x[worst])}"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 96), (0, 64), (2, 3, 130), (5, 1025), (9,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_gelu(shape, dtype, approximate):
    x = randn(*shape, dtype=dtype, scale=4)
    for bias in (randn(shape[-1], dtype=dtype, seed=1), randn(*shape, dtype=dtype, seed=2)):
        expected = F.gelu((x + bias).double(), approximate=approximate)
        for given in (x, strided(x)):
            close(ops.fused_add_gelu(given, bias, approximate), expected, dtype)


@pytest.mark.parametrize("shape", [(1, 1), (3, 96), (0, 64), (2, 3, 130), (5, 1025), (9,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_element_wise_mul_add(shape, dtype):
    a, full, other = (randn(*shape, dtype=dtype, seed=s) for s in range(3))
    row, other_row = (randn(shape[-1], dtype=dtype, seed=s) for s in (3, 4))
    for b, c in ((full, other), (row, other), (full, row), (row, other_row)):
        for given in (a, strided(a)):
            assert torch.equal(ops.element_wise_mul_add(given, b, c), a * b + c)  # every rounding is the reference's


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda x: ops.fused_activation(x, "swish"), "kind"),
        (lambda x: ops.fused_add_gelu(x, x[0], "sigmoid"), "approximate"),
        (lambda x: ops.fused_add_gelu(x, x[:, 0]), "bias"),
        (lambda x: ops.element_wise_mul_add(x, x, x[:1]), "c"),
        (lambda x: ops.silu_and_mul(x[:, :3]), "gate_up"),
        (lambda x: ops.layernorm_residual_dropout_gelu(x, x, x[0], x[0], p=1.5), "p"),
    ],
)
def test_wrong_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        call(randn(5, 8, dtype=torch.float32))


# ---------------------------------------------------------------------------------------------- rotary, cache, embedding


@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (1, 1, 32), (5, 5, 96)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_embedding_and_qk_norm_rope(heads, dtype):
    num_heads, num_kv_heads, head_dim = heads
    q_weight, k_weight = randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2)
    for tokens in (0, 1, 6) + ((256, 3000) if DEVICE == "cuda" else ()):
        qkv = randn(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=tokens)
        q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        angles = torch.outer(torch.arange(500.0), 1e4 ** -torch.linspace(0, 1, head_dim // 2))
        table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
        positions = torch.randint(500, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        before = qkv.clone()
        for got, native in zip(
            ops.rotary_embedding(positions, q, k, table), native_rotary_embedding.native(positions, q, k, table)
        ):
            assert torch.equal(got, native) and got.is_contiguous()
        got = ops.qk_norm_rope(positions, q, k, q_weight, k_weight, 1e-6, table)
        native = native_qk_norm_rope.native(positions, q, k, q_weight, k_weight, 1e-6, table)
        for g, n in zip(got, native):
            like(g, n)
        assert torch.equal(qkv, before)


def test_positions_and_slots_out_of_range_are_named(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    q, k, v = (randn(3, heads, 32, dtype=torch.float32, seed=i) for i, heads in enumerate((4, 2, 2)))
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 32, device=DEVICE)
    weight, table = torch.ones(32, device=DEVICE), torch.zeros(9, 32, device=DEVICE)
    slots, good = torch.tensor([0, 1, 7], device=DEVICE), torch.tensor([8, 0, 1], device=DEVICE)

    def store(positions, slots=slots):
        return ops.qk_norm_rope_store(positions, q, k, v, table, k_cache, v_cache, slots)

    calls = (
        store,
        lambda positions: ops.rotary_embedding(positions, q, k, table),
        lambda positions: ops.qk_norm_rope(positions, q, k, weight, weight, 1e-6, table),
    )
    for call in calls:
        call(good)
        for bad in (9, -1):
            with pytest.raises(ValueError, match=f"positions: token 1 has position {bad}, expected 0 to 8"):
                call(torch.tensor([8, bad, 1], device=DEVICE))
    for bad in (8, -1):
        wrong = torch.tensor([0, 1, bad], device=DEVICE)
        with pytest.raises(ValueError, match=f"slot_mapping: token 2 has slot {bad} "):
            store(good, wrong)
        with pytest.raises(ValueError, match=f"slot_mapping: token 2 has slot {bad} "):
            ops.store_kvcache(k, v, k_cache, v_cache, wrong)


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 64), (12, 4, 128), (8, 8, 96)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_of_many_tokens(many, heads, dtype):
    num_heads, num_kv_heads, head_dim = heads
    weights = randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2)
    angles = torch.outer(torch.arange(50.0), 1e4 ** -torch.linspace(0, 1, head_dim // 2))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    for tokens in (2, 3):
        qkv = randn(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=tokens)
        q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        got = ops.rotary_embedding(positions, q, k, table)
        for g, native in zip(got, native_rotary_embedding.native(positions, q, k, table)):
            assert torch.equal(g, native) and g.is_contiguous()
        normed = ops.qk_norm_rope(positions, q, k, *weights, 1e-6, table)
        for g, native in zip(normed, native_qk_norm_rope.native(positions, q, k, *weights, 1e-6, table)):
            like(g, native)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kvcache(dtype):
    for tokens, num_kv_heads, head_dim in ((0, 2, 32), (1, 8, 128), (11, 3, 64)):
        qkv = randn(tokens, 4 * num_kv_heads, head_dim, dtype=dtype)
        v = qkv[:, 3 * num_kv_heads :]
        k = qkv[:, num_kv_heads : 2 * num_kv_heads].contiguous()
        slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
        k_cache, v_cache = (randn(5, 4, num_kv_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
        expected = k_cache.clone(), v_cache.clone()
        expected[0].flatten(0, 1)[slots], expected[1].flatten(0, 1)[slots] = k, v
        assert ops.store_kvcache(k, v, k_cache, v_cache, slots) is None
        assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])
        # A layer of a cache that holds K and V of a slot side by side.
        both = torch.stack((k_cache, v_cache), 2)
        if tokens:
            ops.store_kvcache(v, k, both[:, :, 0], both[:, :, 1], slots)
            assert torch.equal(both[:, :, 0].flatten(0, 1)[slots], v) and torch.equal(
                both[:, :, 1].flatten(0, 1)[slots], k
            )


def test_store_kvcache_names_a_cache_it_cannot_write():
    k = randn(1, 2, 32, dtype=torch.float32)
    cache = randn(4, 2, 4, 32, dtype=torch.float32)
    with pytest.raises(ValueError, match="^v_cache: "):
        ops.store_kvcache(
            k,
            k,
            cache.transpose(1, 2).contiguous(),
            cache.transpose(1, 2),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype):
    for tokens, size in ((0, 8), (1, 1024), (7, 33), (5, 5120)):
        weight = randn(50, size, dtype=dtype)
        ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        assert torch.equal(ops.embedding(ids, weight), weight[ids])
        assert torch.equal(ops.embedding(ids, strided(weight)), weight[ids])


# ----------------------------------------------------------------------------------------------- launched early, captured


if DEVICE == "cuda":

    @pytest.mark.parametrize("rows", [1, 32])
    def test_kernels_that_are_launched_early_wait_for_what_they_read(rows, monkeypatch):
        """A captured step of them, between matrix products: every replay has the bits of one in which none is launched early."""
        from nanovllm.kernels.triton import early_start

        monkeypatch.undo()  # no kernel that fills memory between two of the step
        dtype, size, inner, vocab = torch.bfloat16, 1024, 3072, 32000
        table, weight = randn(vocab, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
        weight = torch.nn.Parameter(weight, requires_grad=False)  # read before the kernel before has ended
        ups = [randn(2 * inner, size, dtype=dtype, seed=s, scale=size**-0.5) for s in range(2, 8)]
        downs = [randn(size, inner, dtype=dtype, seed=s, scale=inner**-0.5) for s in range(8, 14)]
        first = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        ids = first.clone()
        zeros, hot = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.ones(rows, device=DEVICE)

        def step():
            x = ops.embedding(ids, table)
            residual = x.clone()
            x = ops.rms_norm(x, weight, 1e-6)
            for up, down in zip(ups, downs):
                x = F.linear(ops.silu_and_mul(F.linear(x, up)), down)
                x, residual = ops.add_rms_norm(x, residual, weight, 1e-6)
            ids.copy_(ops.sample(F.linear(x, table), hot, None, None, None, zeros, zeros))
            return x, residual

        def captured():
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = step()
            return graph, results

        def run(graph, results):
            ids.copy_(first)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            return [t.clone() for t in (*results, ids)]

        early = captured()
        monkeypatch.setattr(early_start, "has_dependent_launch", lambda device: False)
        expected = run(*captured())
        assert all(t.isfinite().all() for t in expected[:2])
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(run(*early), expected))


# ----------------------------------------------------------------------------------------------------- the interpreter


@triton.jit
def _after(a, b, c, d):
    """First x -> a * x + b, then x -> c * x + d: the order matters."""
    return a * c, b * c + d


@triton.jit
def _chains(out_ptr, a_ptr, b_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)
    a, b = tl.reduce((tl.load(a_ptr + at), tl.load(b_ptr + at)), AXIS, _after, keep_dims=KEEP)
    count: tl.constexpr = SIZE if AXIS == 0 else ROWS
    to = tl.arange(0, count)
    tl.store(out_ptr + to, a.reshape(count))
    tl.store(out_ptr + count + to, b.reshape(count))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_quickened_reductions_keep_the_order_of_elements(axis, keep):
    a, b = (
        torch.randint(-3, 4, (4, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
        for seed in (0, 1)
    )
    first, second = a.select(axis, 0), b.select(axis, 0)
    for i in range(1, a.shape[axis]):
        first, second = first * a.select(axis, i), second * a.select(axis, i) + b.select(axis, i)
    out = torch.empty(2 * len(first), dtype=torch.int64)
    _chains[(1,)](out, a, b, axis, keep, 4, 8)
    assert torch.equal(out, torch.cat([first, second]))


# --------------------------------------------------------------------------------------------------------------- a copy


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 17, 4096, 8192, 3 * 8192 + 16, 100003])
def test_copy(num_bytes):
    """All bytes and no more: odd sizes, sizes of less than a load, of whole programs, and one load beyond them."""
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    for plan in (
        *copy_plans(DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 9),
        CopyPlan(1, 8, False, stream=True),
    ):
        target = torch.full((num_bytes + 100,), 77, dtype=torch.int8, device=DEVICE)
        copy(target[:num_bytes], source, plan)
        assert torch.equal(target[:num_bytes], source) and bool((target[num_bytes:] == 77).all()), plan


def test_copy_of_other_dtypes():
    source = randn(5, 7, dtype=torch.float32)
    target = torch.zeros_like(source)
    copy(target, source, CopyPlan(2, 4, False))
    assert torch.equal(target, source)


def test_copy_says_what_it_does_not_take():
    x = torch.zeros(64, dtype=torch.int8, device=DEVICE)
    plan = CopyPlan(1, 4, False)
    for wrong in (x[1:33], x[:48], x[::2]):
        with pytest.raises(ValueError, match="^target: expected 32 contiguous bytes, aligned to 16"):
            copy(wrong, x[:32], plan)
    with pytest.raises(ValueError, match="^source: "):
        copy(x[:32], x[1:33], plan)


# ------------------------------------------------------------------------------------------------- where there is no GPU


@pytest.mark.slow
def test_in_the_interpreter():
    check_interpreted(__file__)


# Only what can run here is collected, so that nothing is reported as skipped.
for _name in [name for name in globals() if name.startswith("test_")]:
    if (_name == "test_in_the_interpreter") == RUNS_HERE or "quickened" in _name and not INTERPRETED:
        del globals()[_name]
