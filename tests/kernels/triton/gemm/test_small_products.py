"""The small-batch products against float64 and against the ops that they fuse."""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

from nanovllm.kernels.ops.add_rms_norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from nanovllm.kernels.ops.linear import linear
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm import hopper_product, small_products
from nanovllm.kernels.triton.gemm.small_product_plan import (
    MAX_TOKENS,
    SHARED_BYTES,
    MatrixPlan,
    VectorPlan,
    max_tokens,
    plan_small_product,
)
from tests.kernels.triton.common import DTYPES, graph_of, randn, strided

pytestmark = pytest.mark.usefixtures("poison")
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
TOKENS = [1, 3, 8]
# (outputs, size): no power of two, one element, several tiles, fewer columns than a tile, rows left over in the last
# program.
SHAPES = [(1, 1), (19, 1000), (5, 33), (5, 2100), (2, 3073), (3, 8200)]
# Qwen3-0.6B, 1.7B and 8B: QKV, output, gate-up and down projections.
REAL = [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (4096, 2048), (6144, 2048), (2048, 6144),
        (6144, 4096), (4096, 4096), (12288, 4096), (4096, 12288)]  # fmt: skip
EPS = 1e-6


def inputs(tokens, outputs, size, dtype, seed=0, scale=1.0):
    return SimpleNamespace(
        x=randn(tokens, size, dtype=dtype, seed=seed, scale=scale),
        residual=randn(tokens, size, dtype=dtype, seed=seed + 1, scale=scale),
        norm=randn(size, dtype=dtype, seed=seed + 2),
        weight=randn(2 * outputs, size, dtype=dtype, seed=seed + 3, scale=size**-0.5),
        bias=randn(2 * outputs, dtype=dtype, seed=seed + 4),
    )


def normed_64(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(got, expected, dtype):
    assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
    tolerance = RELATIVE[dtype] * (expected.abs().amax().clamp(min=1.0).item() if expected.numel() else 1.0)
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


def like(got, native):
    """The same roundings in the same places. Only the order of sums differs, so few results differ, by one or two.

    One of few results may differ by four roundings, each at most torch.finfo.eps of it: a gate of -3 that is rounded
    the other way changes silu(gate) by 1.9 times as much, and with it the two roundings that follow.
    """
    assert got.dtype == native.dtype and got.shape == native.shape
    wanted = native.double()
    size = wanted.norm().clamp(min=1e-30)
    error = (got.double() - wanted).norm() / size
    many = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}[got.dtype]
    one = 4 * torch.finfo(got.dtype).eps * wanted.abs().amax() / size if wanted.numel() else 0.0
    assert error < max(many, one), f"{error:.1e}, {wanted.numel()} results"


def runs_here(x, weight, gated, norm):
    """Whether a kernel of this package multiplies, not the library's."""
    return small_products.small_plan(x, weight, gated, norm) is not None or (
        not norm and hopper_product.takes(x, weight, gated)
    )


def check(tokens, outputs, size, dtype, seed=0, scale=1.0, like=like):
    """All three ops, with and without bias and residual.

    Only where a kernel of ours runs with float64 too: the library may add up parts of a long sum in the result's dtype.
    """
    a = inputs(tokens, outputs, size, dtype, seed, scale)

    def close_if_ours(got, expected, gated, norm):
        if runs_here(a.x, a.weight, gated, norm):
            close(got, expected, dtype)

    before = [t.clone() for t in vars(a).values()]
    total = a.residual + a.x
    for residual, stream in ((a.residual, total), (None, a.x)):
        wide = normed_64(stream, a.norm)
        for bias in (a.bias, None):
            got, new = small_products.add_rms_norm_linear(a.x, residual, a.norm, EPS, a.weight, bias)
            native, _ = add_rms_norm_linear.native(a.x, residual, a.norm, EPS, a.weight, bias)
            assert torch.equal(new, stream)
            exact = F.linear(wide, a.weight.double(), None if bias is None else bias.double())
            close_if_ours(got, exact, gated=False, norm=True)
            like(got, native)
        got, new = small_products.add_rms_norm_gate_up(a.x, residual, a.norm, EPS, a.weight)
        native, _ = add_rms_norm_gate_up.native(a.x, residual, a.norm, EPS, a.weight)
        assert torch.equal(new, stream)
        gate, up = F.linear(wide, a.weight.double()).chunk(2, -1)
        close_if_ours(got, F.silu(gate) * up, gated=True, norm=True)
        like(got, native)
    for bias in (a.bias, None):
        got = small_products.linear(a.x, a.weight, bias)
        exact = F.linear(a.x.double(), a.weight.double(), None if bias is None else bias.double())
        close_if_ours(got, exact, gated=False, norm=False)
        like(got, linear.native(a.x, a.weight, bias))
    assert all(torch.equal(t, b) for t, b in zip(vars(a).values(), before)), "an input was changed"


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("shape, dtype", [*zip(SHAPES, itertools.cycle(DTYPES)), ((5, 33), DTYPES[0])], ids=str)
def test_small_shapes(shape, dtype):
    outputs, size = shape
    for tokens in TOKENS:
        check(tokens, outputs, size, dtype, seed=tokens)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 50.0])
def test_magnitudes(scale):
    for tokens in (1, 8):
        check(tokens, 20, 96, torch.bfloat16, scale=scale)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("tokens, rows, split, depth", [(2, 16, 8, 32), (5, 32, 4, 16), (8, 16, 8, 16), (7, 8, 8, 32)])
def test_norms_after_the_product(tokens, rows, split, depth):
    """Rounded once less than the reference: as near to it as two ways of rounding are, and no farther from the exact
    result.
    """
    dtype, plan = torch.bfloat16, MatrixPlan(rows, split, depth, late=True)

    def near(got, native):
        assert (got.double() - native.double()).norm() < 1e-2 * native.double().norm()

    for outputs, size in ((20, 96), (37, 600))[: 2 if tokens == 5 else 1]:
        a = inputs(tokens, outputs, size, dtype)
        with ExitStack() as planned:
            for half, norm in ((1, True), (1, False), (2, True)):
                key = tokens, len(a.weight) // half, size, dtype, half == 2, norm
                planned.enter_context(tunables.SMALL_PRODUCT.using(a.x.device, key, plan))
            for scale in (1.0, 50.0):
                check(tokens, outputs, size, dtype, seed=tokens, scale=scale, like=near)
            exact = F.linear(normed_64(a.residual + a.x, a.norm), a.weight.double())
            got, native = (
                fn(a.x, a.residual, a.norm, EPS, a.weight)[0].double() - exact
                for fn in (small_products.add_rms_norm_linear, add_rms_norm_linear.native)
            )
        assert got.norm() < 1.1 * native.norm()


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, MAX_TOKENS + 1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_numbers_of_tokens_are_the_kernels_that_are_fused(tokens, dtype):
    a = inputs(tokens, 12, 72, dtype)  # on Hopper a kernel of its own takes multiples of 64
    assert not any(small_products.small_plan(a.x, a.weight, gated, norm) for gated in (0, 1) for norm in (0, 1))
    for residual in (a.residual, None):
        for op, more in ((add_rms_norm_linear, (a.bias,)), (add_rms_norm_gate_up, ())):
            args = a.x, residual, a.norm, EPS, a.weight, *more
            (got, new), (native, total) = getattr(small_products, op.name)(*args), op.native(*args)
            assert torch.equal(new, total)
            close(got, native.double(), dtype)
    assert torch.equal(small_products.linear(a.x, a.weight), F.linear(a.x, a.weight))


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
def test_strided_inputs_and_leading_dimensions(tokens):
    a = inputs(tokens, 20, 96, torch.float16)

    expected = small_products.add_rms_norm_gate_up(a.x, a.residual, a.norm, EPS, a.weight)
    for x, residual in ((strided(a.x), strided(a.residual)), (a.x[None], a.residual[None])):
        for got, want in zip(small_products.add_rms_norm_gate_up(x, residual, a.norm, EPS, a.weight), expected):
            assert torch.equal(got.reshape(want.shape), want)
    padded = strided(a.weight)  # its rows are apart: the library takes them
    like(small_products.linear(a.x, padded), F.linear(a.x, a.weight))


@pytest.mark.triton
@pytest.mark.slow
def test_infinities_and_nan_stay_in_their_rows():
    a = inputs(4, 12, 80, torch.float16)
    a.x[1, 3], a.x[2, 7] = float("nan"), float("inf")
    y, total = small_products.add_rms_norm_linear(a.x, a.residual, a.norm, EPS, a.weight)
    assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()
    assert torch.equal(total.isnan(), (a.x + a.residual).isnan())


def test_plans_are_small_enough_and_made_of_shapes_alone():
    for outputs, size in [*SHAPES, *REAL, (151936, 1024), (8, 200000)]:
        for gated in (False, True):
            for dtype in DTYPES:
                most = max_tokens(outputs, size, gated, dtype)
                for tokens in range(1, MAX_TOKENS + 3):
                    cut = plan_small_product(tokens, outputs, size, gated, dtype)
                    assert (cut is not None) == (tokens <= most)
                    if isinstance(cut, VectorPlan):
                        assert cut.block == cut.warps * 32 * 16 // dtype.itemsize and cut.rows >= (2 if gated else 1)
                        held = cut.rows * -(-size // cut.block) * cut.block * dtype.itemsize / (cut.warps * 32)
                        assert held <= 512, f"{held} bytes of weights a thread for {outputs} x {size}"
                    elif isinstance(cut, MatrixPlan):
                        block = cut.split * cut.depth
                        columns = -(-size // block) * block
                        padded = 1 << (tokens - 1).bit_length()
                        assert cut.depth >= 16 and (cut.rows + padded) * columns * dtype.itemsize <= SHARED_BYTES
    assert plan_small_product(1, 8, 200000, False, torch.bfloat16) is None  # the registers would not hold a row
    assert max_tokens(4096, 1024, False, torch.bfloat16) == MAX_TOKENS
    assert max_tokens(6144, 4096, False, torch.bfloat16) == 1
    assert max_tokens(64, 64, False, torch.float64) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("outputs, size", REAL, ids=str)
def test_real_shapes(outputs, size):
    for tokens in (1, 2, 5, 8):
        if tokens <= max_tokens(outputs, size, False, torch.bfloat16):
            check(tokens, outputs, size, torch.bfloat16, seed=tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_ten_thousand_replays_give_the_same_bits(tokens):
    """A chain whose kernels start before their predecessors end: a missing wait would show as another result."""
    hidden, layers, dtype = 1024, 4, torch.bfloat16
    norms = [randn(hidden, dtype=dtype, seed=i) for i in range(2 * layers)]
    qkv, gate_up = ([randn(n, hidden, dtype=dtype, seed=i, scale=0.03) for i in range(layers)] for n in (4096, 6144))
    out, down = ([randn(hidden, n, dtype=dtype, seed=i, scale=0.03) for i in range(layers)] for n in (2048, 3072))
    x, residual = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype, seed=1)

    def run(ops):
        h, r = x, residual
        for i in range(layers):
            q, r = ops.add_rms_norm_linear(h, r, norms[2 * i], EPS, qkv[i])
            h = ops.linear(q[:, :2048], out[i])
            g, r = ops.add_rms_norm_gate_up(h, r, norms[2 * i + 1], EPS, gate_up[i])
            h = ops.linear(g, down[i])
        return h, r

    eager = [t.clone() for t in run(small_products)]
    native = SimpleNamespace(**{op.name: op.native for op in (add_rms_norm_linear, add_rms_norm_gate_up, linear)})
    for got, want in zip(eager, run(native)):
        assert (got.double() - want.double()).norm() / want.double().norm() < 2e-2
    graph, results = graph_of(lambda: run(small_products))
    for i in range(10_000):
        graph.replay()
        if i % 100 == 0 or i == 9_999:
            assert all(torch.equal(a, b) for a, b in zip(results, eager)), f"replay {i} differs"
