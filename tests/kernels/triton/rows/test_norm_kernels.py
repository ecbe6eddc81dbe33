"""RMS norm, layer norm and softmax against float64 and the references."""

import itertools

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
import nanovllm.kernels.triton.rows as ops
from nanovllm.kernels.ops.norm import add_rms_norm as native_add_rms_norm
from nanovllm.kernels.ops.norm import rms_norm as native_rms_norm
from nanovllm.kernels.triton.launch_arguments import num_sms
from nanovllm.kernels.triton.rows.pieces import cut_of_many
from nanovllm.kernels.triton.rows.plans import POLICY
from tests.kernels.triton.common import DEVICE, DTYPES, GPU, randn, strided
from tests.kernels.triton.rows.comparisons import MANY, RELATIVE, close, like

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("poison")]
MOST_SHARED = num_sms(torch.empty(0, device=DEVICE))  # rows that several programs share


def rms_norm_64(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


# Of many rows 1024 to 7168 are cut into 2 to 7 pieces, the other sizes are one block.
SIZES = (1024, 1280, 1536, 5120, 7168, 1100, 2048, 512)
MANY_ROWS = [*zip(SIZES, itertools.cycle(DTYPES)), *((size, torch.float32) for size in (1280, 1100))]


@pytest.mark.parametrize("size, dtype", MANY_ROWS, ids=str)
def test_rms_norm_of_many_rows(size, dtype):
    x, weight = randn(3, size, dtype=dtype, scale=3), randn(size, dtype=dtype, seed=1)
    for given in (x, strided(x)):
        before = given.clone()
        y = ops.rms_norm(given, weight, 1e-6, MANY)
        close(y, rms_norm_64(x, weight), dtype)
        like(y, native_rms_norm.native(x, weight, 1e-6))
        assert torch.equal(given, before) and y.is_contiguous()


@pytest.mark.parametrize("policy, sizes", [(POLICY, (128,)), (MANY, (1024, 1280, 1100))])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rms_norm_of_the_heads_of_a_fused_projection(dtype, policy, sizes):
    for tokens, size in itertools.product((1, 300) if GPU else (3,), sizes):
        qkv = randn(tokens, 7, size, dtype=dtype, seed=tokens)
        weight = randn(size, dtype=dtype, seed=1)
        for view in qkv.split((4, 2, 1), dim=1):
            y = ops.rms_norm(view, weight, 1e-6, policy)
            close(y, rms_norm_64(view, weight), dtype)
            like(y, native_rms_norm.native(view, weight, 1e-6))


def test_rms_norm_does_not_overflow():
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=DEVICE)
    assert torch.equal(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("shape, dtype", [*zip(((2, 3, 130), (2, 1025), (2, 33000)), DTYPES)], ids=str)
def test_add_rms_norm(shape, dtype):
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    weight = randn(shape[-1], dtype=dtype, seed=2)
    native_y, native_sum = native_add_rms_norm.native(x, residual, weight, 1e-6)
    given = x.clone(), residual.clone()
    y, total = ops.add_rms_norm(*given, weight, 1e-6)
    assert torch.equal(total, native_sum)
    like(y, native_y)
    close(y, rms_norm_64(total, weight), dtype)
    assert (y.data_ptr(), total.data_ptr()) == tuple(t.data_ptr() for t in given)  # in place
    apart = strided(x), strided(residual)
    y, total = ops.add_rms_norm(*apart, weight, 1e-6)
    assert torch.equal(total, native_sum)
    assert torch.equal(apart[0], x) and torch.equal(apart[1], residual)
    like(y, native_y)


@pytest.mark.parametrize("size, dtype", MANY_ROWS, ids=str)
def test_layer_norm_of_many_rows(size, dtype):
    x = randn(3, size, dtype=dtype, scale=3) + 5
    weight, bias = randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    for given in (x, strided(x)):
        close(ops.layer_norm(given, weight, bias, 1e-5, MANY), expected, dtype, slack=3)


@pytest.mark.parametrize(
    "size, cut", [(1024, (2, 2)), (1280, (5, 1)), (1536, (3, 2)), (5120, (5, 4)), (7168, (7, 4)), (1100, None)]
)
def test_how_many_rows_are_cut(size, cut):
    assert cut_of_many(size, 7) == cut


def test_rows_without_elements():
    x, none = randn(5, 0, dtype=torch.float32), randn(0, dtype=torch.float32)
    assert ops.layer_norm(x, none, none, 1e-5).shape == (5, 0)
    assert ops.layernorm_residual_dropout_gelu(x, x, none, none, p=0.5).shape == (5, 0)


def far_rows(size):
    """Rows whose mean is far from zero, or that begin with outliers: one, and so many that what a row is centred on
    is one."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    x[0] += 1e4
    x[1] = x[1] * 100 - 1e4
    x[2, 0] = 3e4
    x[3, :40] = 1e4
    x[4, -1] = -3e4
    return x


@pytest.mark.parametrize("policy", [POLICY, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("size", [1024, 1280, 40] + ([1100, 5120, 20000] if GPU else []))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norms_of_rows_far_from_zero(dtype, size, policy):
    x = far_rows(size).to(dtype).to(DEVICE)
    weight, bias = randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    close(ops.layer_norm(x, weight, bias, 1e-5, policy), expected, dtype, slack=3)
    y = ops.layernorm_residual_dropout_gelu(x, torch.zeros_like(x), weight, bias, policy=policy)
    # In float16 the first row is nearly constant; of many rows the chain has its mean in one number.
    rows = slice(1, None) if dtype == torch.float16 and policy is MANY else slice(None)
    close(y[rows], F.gelu(expected[rows]), dtype, slack=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_many_rows_keep_infinities_to_their_row(dtype):
    x, weight = randn(4, 1280, dtype=dtype), randn(1280, dtype=dtype, seed=1)
    x[1, 1279], x[2, 300] = float("inf"), float("nan")
    rms, layer = ops.rms_norm(x, weight, 1e-6, MANY), ops.layer_norm(x, weight, weight, 1e-6, MANY)
    assert rms[2].isnan().all() and layer[1:3].isnan().all() and rms[1].isnan().sum() == 1
    assert rms[::3].isfinite().all() and layer[::3].isfinite().all()


@pytest.mark.parametrize("rows", [17, MOST_SHARED + 1], ids=["large parts", "a program each"])
def test_softmax_of_more_long_rows(rows):
    """More than 16 rows are shared in large parts; more than there are multiprocessors, not at all."""
    x = strided(randn(rows, 33000, dtype=torch.bfloat16, scale=9.0))
    torch.testing.assert_close(ops.softmax(x).double(), torch.softmax(x.double(), -1), rtol=2e-2, atol=6e-8)


def test_softmax_of_one_row_is_the_same_beside_others():
    x = randn(3, 40000, dtype=torch.float32)
    assert torch.equal(ops.softmax(x)[1:2], ops.softmax(x[1:2]))


@pytest.mark.parametrize("shape, dtype", [*zip(((2, 3, 130), (2, 33000), (7, 33)), DTYPES)], ids=str)
def test_softmax_is_right_far_below_the_maximum(shape, dtype):
    """Relative to the value: most of a long row is far below any absolute tolerance."""
    x = randn(*shape, dtype=dtype, scale=100.0)
    got = ops.softmax(strided(x))
    torch.testing.assert_close(got.double(), torch.softmax(x.double(), -1), rtol=3 * RELATIVE[dtype], atol=6e-8)


@pytest.mark.parametrize("size, copies", [(5, 1), (40000, 1), (40000, 1 + MOST_SHARED // 4)])
def test_softmax_of_infinities(size, copies):
    x = torch.full((4, size), -float("inf"), device=DEVICE)
    x[1, 3] = 2.0
    x[2, :] = 3e38
    x[3, 1::2] = 1.0
    x = x.repeat(copies, 1)
    torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1), rtol=1e-5, atol=1e-12, equal_nan=True)
