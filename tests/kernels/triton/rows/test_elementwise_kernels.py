"""Elementwise kernels and the copy against float64 and the references."""

import itertools

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
import nanovllm.kernels.triton.rows as ops
from nanovllm.hardware.probe_kernels import CopyPlan, copy, copy_plans
from nanovllm.kernels.ops.activation import silu_and_mul as native_silu_and_mul
from nanovllm.kernels.triton.rows.plans import POLICY
from tests.kernels.triton.common import DEVICE, DTYPES, randn, strided
from tests.kernels.triton.rows.comparisons import MANY, close, like

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("poison")]


KINDS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
}


def with_dtypes(cases):
    """Each with a dtype, by turns."""
    return [(*case, dtype) for case, dtype in zip(cases, itertools.cycle(DTYPES))]


def magnitudes(dtype):
    """Values of every magnitude that the dtype has, of both signs."""
    top = torch.finfo(dtype).max
    values = torch.logspace(-6, 38, 89, dtype=torch.float64).clamp(max=top)
    values = torch.cat((values, torch.linspace(0, 30, 120, dtype=torch.float64)))
    return torch.cat((values, -values)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_activation(kind, dtype):
    x = magnitudes(dtype)
    y = ops.fused_activation(x, kind)
    close(y, KINDS[kind](x.double()), dtype)
    assert kind == "relu" or y.isfinite().all()
    nan = torch.full((3,), float("nan"), dtype=dtype, device=DEVICE)
    assert ops.fused_activation(nan, kind).isnan().all()


# Of many elements a program has exact pieces of rows of 512 and 1536.
GATED = [((2, 3, 130), POLICY), ((3, 1024), MANY), ((3, 3072), MANY), ((3, 12292), MANY)]


@pytest.mark.parametrize("shape, policy, dtype", with_dtypes(GATED), ids=str)
def test_activations_of_a_fused_gate_up(shape, policy, dtype):
    x = randn(*shape, dtype=dtype, scale=4)
    gate, up = x.double().chunk(2, -1)
    for given in (x, strided(x)):
        close(ops.silu_and_mul(given, policy), F.silu(gate) * up, dtype, slack=2)
        for approximate in ("none", "tanh"):
            expected = F.gelu(gate, approximate=approximate) * up
            close(ops.gelu_and_mul(given, approximate, policy), expected, dtype, slack=2)
    like(ops.silu_and_mul(x, policy), native_silu_and_mul.native(x))


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


ADDED = [((2, 3, 130), POLICY), ((9,), POLICY), *(((3, n), MANY) for n in (1024, 3072, 12292))]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape, policy, dtype", with_dtypes(ADDED), ids=str)
def test_fused_add_gelu(shape, policy, dtype, approximate):
    x = randn(*shape, dtype=dtype, scale=4)
    for bias in (randn(shape[-1], dtype=dtype, seed=1), randn(*shape, dtype=dtype, seed=2)):
        expected = F.gelu((x + bias).double(), approximate=approximate)
        for given in (x, strided(x)):
            close(ops.fused_add_gelu(given, bias, approximate, policy), expected, dtype)


@pytest.mark.parametrize("shape, dtype", with_dtypes([((2, 3, 130),), ((9,),), ((5, 1025),)]), ids=str)
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


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 17, 4096, 8192, 3 * 8192 + 16, 100003])
def test_copy(num_bytes):
    """All bytes and no more: odd sizes, sizes of less than a load, of whole programs, and one load beyond them."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, generator=generator).to(DEVICE)
    plans = copy_plans(DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 9)
    for plan in (*plans, CopyPlan(1, 8, False, stream=True)):
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
