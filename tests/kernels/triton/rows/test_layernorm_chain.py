"""The chain of layer norm, residual, dropout and GELU against the reference."""

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
import nanovllm.kernels.triton.rows as ops
from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import DROPOUT_ROUNDS, dropout_counts
from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import (
    layernorm_residual_dropout_gelu as native_chain,
)
from nanovllm.kernels.ops.sample import philox
from nanovllm.kernels.triton.rows.layernorm_chain import MOST_PACKED, split_factor
from nanovllm.kernels.triton.rows.plans import POLICY
from tests.kernels.triton.common import DTYPES, GPU, randn, strided
from tests.kernels.triton.rows.comparisons import MANY, close

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize("p, approximate, dtype", [*zip((0.0, 0.3, 1.0), ("none", "tanh", "none"), DTYPES)], ids=str)
def test_layernorm_chain(p, approximate, dtype):
    for shape in [(2, 3, 130), (1, 1)] + ([(512, 4096)] if GPU else []):
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


@pytest.mark.parametrize("p, dtype", [(0.0, DTYPES[0]), *((0.3, dtype) for dtype in DTYPES), (1.0, DTYPES[1])], ids=str)
def test_layernorm_chain_of_many_rows(p, dtype):
    for size in (1024, 1280, 130):
        x, residual = randn(3, size, dtype=dtype), randn(3, size, dtype=dtype, seed=1)
        args = (randn(size, dtype=dtype, seed=2), randn(size, dtype=dtype, seed=3), 1e-5, p, 2**40 + 3, "none")
        y = ops.layernorm_residual_dropout_gelu(x, residual, *args, MANY)
        close(y, native_chain.native(x, residual, *args), dtype, slack=4)
        assert torch.equal(y, ops.layernorm_residual_dropout_gelu(strided(x), strided(residual), *args, MANY))


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


# 0.984375 is above what is compared in pairs; 0.5 has a factor that bfloat16 holds; 0.96 is the first whose factor is
# split inexactly; the last and the first leave and drop one in 32768.
@pytest.mark.parametrize("p", [2**-15, 0.1, 0.5, 0.96, 0.984375, 1 - 2**-15], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_mask_is_the_references(dtype, p):
    rows, cases = 3, [(size, POLICY) for size in (1, 7, 130)] + [(512, MANY)]
    if GPU:
        sizes = (1, 2, 7, 8, 33, 130, 512, 1024, 1100, 1280, 4096, 5120, 20000)
        # Of the two policies one with each size, by turns, and a third of the sizes with neither.
        turn = DTYPES.index(dtype) + round(10 * p)
        policies = (POLICY, MANY, None)
        given = [(size, policies[(i + turn) % 3]) for i, size in enumerate(sizes)]
        rows, cases = 300, [(size, policy) for size, policy in given if policy is not None]
    for size, policy in cases:
        x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
        residual = torch.full_like(x, 40)  # so that only dropout gives 0
        args = (weight, weight, 1e-5, p, size * 2**33 + 1)
        got = ops.layernorm_residual_dropout_gelu(x, residual, *args, policy=policy)
        native = native_chain.native(x, residual, *args)
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
    halves = torch.arange(2**16)
    numbers = halves.to(torch.int16).view(torch.float16).abs()
    for limit in (1, 2, 1023, 1024, 3277, 16384, 31743, MOST_PACKED):
        bound = torch.tensor([limit], dtype=torch.int16).view(torch.float16)
        assert torch.equal(~(numbers < bound), halves % 2**15 >= limit)


def test_factors_split_in_two_bfloat16():
    """Of every probability, all 128 significands: rounded twice as the kernel does, and once."""
    scales = [2**15 / (2**15 - limit) for limit in range(1, MOST_PACKED + 1, 7)]
    high, low = torch.tensor([split_factor(s) for s in scales], dtype=torch.float64).unbind(-1)
    v, factor = torch.arange(128, 256).double()[:, None], torch.tensor(scales)
    assert torch.equal(high.bfloat16().double(), high) and (low >= 0).all() and (low <= high / 128).all()
    once = (v.float() * factor).bfloat16()
    twice = (v * high + (v * low.bfloat16().double()).bfloat16().double()).bfloat16()
    different = once != twice
    assert different.any(0).double().mean() < 0.2 and different.sum(0).max() <= 5
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=0)
