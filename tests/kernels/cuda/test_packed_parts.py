"""Products of int4 with 129 to 256 tokens on Hopper: two launches, whose results lie one after the other."""

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.cuda.packed import linear_packed, product_libraries
from tests.kernels.cuda.checks import check, check_gated, make, replayed

BF16 = torch.bfloat16
SUPPORT = product_libraries.packed_support


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [129, 137, 150, 256])
def test_product_and_silu(tokens, hopper, launches):
    """The rest has 1, 9, 22 or 128 tokens, for which other kernels run. Behind x's tokens and columns is NaN."""
    (kind, *weight), values = make("int4", 24576, 1536, hopper)
    x = torch.full((tokens + 64, 1600), torch.nan, dtype=BF16, device=hopper)[:tokens, :1536].normal_()
    bias = torch.randn(24576, dtype=BF16, device=hopper)
    y = linear_packed.linear_int4(x, *weight, bias)
    check(y, x, values, bias)
    assert torch.equal(y, linear_packed.linear_int4(x, *weight, bias)), "other bits in another run"
    assert torch.equal(y, linear_packed.linear_int4(x[:, None], *weight, bias)[:, 0]), "tokens of two dimensions"
    plain = linear_packed.linear_int4(x, *weight)
    check_gated(linear_packed.linear_packed_silu_and_mul(x, kind, *weight), plain, x, values)
    assert len(launches) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [129, 150, 256])
def test_residual_and_norm(tokens, hopper, launches):
    """Each part leaves sums with splits of its own.

    The product and the total are rounded to 16 bits, each once; so are the norm and its product with the weight.
    """
    (kind, *weight), values = make("int4", 4096, 4096, hopper)
    x = torch.randn(tokens, 4096, dtype=BF16, device=hopper)
    residual, norm, bias = torch.randn_like(x), torch.rand_like(x[0]), torch.randn_like(x[0])
    size = x.double().abs() @ values.abs().t()
    for more in ((), (bias,)):
        normed, total = linear_packed.linear_packed_add_rms_norm(x, kind, *weight, residual, norm, 1e-6, *more)
        exact = x.double() @ values.t() + (more[0].double() if more else 0)
        of_product, exact = exact.abs(), exact + residual.double()
        allowed = size * 2**-12 + (of_product + exact.abs()) * 2**-8 + 1e-6
        assert ((total.double() - exact).abs() <= allowed).all()
        wanted = total.double() * (total.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * norm.double()
        assert ((normed.double() - wanted).abs() <= wanted.abs() * 2**-7 * 1.01 + 1e-6).all()
    assert len(launches) == 4


@pytest.mark.gpu
def test_graph_with_other_tokens(hopper):
    (_, *weight), values = make("int4", 24576, 1024, hopper)
    x = torch.randn(200, 1024, dtype=BF16, device=hopper)
    check(replayed(lambda: linear_packed.linear_int4(x, *weight), x), x, values)


@pytest.mark.gpu
def test_what_stays_with_the_other_provider(hopper, launches):
    """257 tokens; and a weight that is too small for the kernel of many tokens."""
    for rows, tokens in ((24576, 257), (64, 200)):
        (_, *weight), values = make("int4", rows, 1024, hopper)
        x = torch.randn(tokens, 1024, dtype=BF16, device=hopper)
        check(linear_packed.linear_int4(x, *weight), x, values)
    assert not launches
