"""Arguments that no op takes, or only the reference: every provider names them before a kernel reads what it must not.

Where there is no GPU, Triton's part runs in its interpreter.
"""

import logging
import math

import pytest
import torch

try:
    import triton

    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    INTERPRETED = False

from nanovllm import kernels
from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.kernels.op.inputs import Tensors
from nanovllm.layers.custom_mlp import CustomGatedMLP
from nanovllm.layers.linear import ColumnParallelLinear

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
PROVIDERS = ["native", pytest.param("triton", marks=pytest.mark.triton)]
ALL = {"*": ["triton"]}


@pytest.fixture(params=PROVIDERS)
def provider(request):
    return request.param


@pytest.fixture(autouse=True)
def values_are_checked(monkeypatch):
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)
    monkeypatch.setenv("NANOVLLM_CHECK", "1")


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def by(provider, name, *args, **kwargs):
    op = all_ops()[name]
    with op.use(provider):
        return op(*args, **kwargs)


# ---- layers


@pytest.mark.parametrize("priority", [{}, pytest.param(ALL, marks=pytest.mark.triton)], ids=str)
@pytest.mark.parametrize(
    "x, said",
    [
        (torch.zeros(2, 9), r"x: expected torch.float32 \[..., 8\] .*, not torch.float32 \[2, 9\]"),
        (torch.zeros(2, 7), r"x: expected torch.float32 \[..., 8\] .*, not torch.float32 \[2, 7\]"),
        (torch.zeros(2, 8).half(), r"x: expected torch.float32 \[..., 8\] .*, not torch.float16 \[2, 8\]"),
        (torch.zeros(2, 8, device="meta"), "x: expected .* on (cpu|cuda).* not .* on meta"),
        (torch.zeros(()), r"x: expected .*, not torch.float32 \[\]"),
        (None, "x: expected .*, not None"),
    ],
    ids=["wide", "narrow", "half", "elsewhere", "scalar", "none"],
)
def test_the_gated_mlp_names_an_input_that_does_not_fit(x, said, priority):
    mlp = CustomGatedMLP(8, 16, device=DEVICE, kernel_priority=priority)
    with pytest.raises(ValueError, match=said):
        mlp(x if x is None or x.is_meta else x.to(DEVICE))
    assert mlp(randn(2, 8)).shape == (2, 8) and mlp(randn(2, 3, 8)).shape == (2, 3, 8)


@pytest.mark.triton
def test_the_gated_mlp_refuses_gradients_with_kernels():
    x = randn(2, 8).requires_grad_()
    mlp = CustomGatedMLP(8, 16, device=DEVICE, kernel_priority=ALL)
    with pytest.raises(
        ValueError, match="^x: requires grad, and kernels have no backward pass.*use_custom_kernels=False"
    ):
        mlp(x)
    with torch.no_grad():
        assert not mlp(x).requires_grad
    mlp.requires_grad_()
    with pytest.raises(ValueError, match=r"^gate_up_proj.weight, down_proj.weight: requires grad"):
        mlp(x.detach())
    with pytest.raises(Exception, match=r"gate_up_proj.weight, down_proj.weight: requires grad"):
        torch.compile(mlp, fullgraph=True, backend="eager")(x.detach())
    with torch.no_grad():
        assert not mlp(x).requires_grad
    with pytest.raises(ValueError, match="x: expected float16, bfloat16 or float32.*, not float64"):
        mlp.double()(randn(2, 8, dtype=torch.float64))


def products(x, weight):
    """Calls of the ops that multiply x by a weight [16, 8], as an engine calls them."""
    ops = resolve_kernels(DEVICE, True, ALL)
    stream, norm = (torch.zeros_like(x), torch.ones_like(x[0])), torch.ones_like(weight[:, 0])
    return {
        "linear": lambda: ops.linear(x, weight),
        "linear_silu_and_mul": lambda: ops.linear_silu_and_mul(x, weight),
        "add_rms_norm_linear": lambda: ops.add_rms_norm_linear(x, *stream, 1e-6, weight),
        "add_rms_norm_gate_up": lambda: ops.add_rms_norm_gate_up(x, *stream, 1e-6, weight),
        "linear_add_rms_norm": lambda: ops.linear_add_rms_norm(x, weight, x.new_zeros(len(x), 16), norm, 1e-6),
    }  # fmt: skip


def check_products():
    weight = randn(16, 8)
    for x in (randn(2, 9), randn(2, 7), randn(2, 8).half(), randn(33, 9)):
        for name, call in products(x, weight).items():
            with pytest.raises(ValueError) as error:
                call()
            said = f"x: expected torch.float32 [..., 8], as the weight has, not {x.dtype} {list(x.shape)}"
            assert str(error.value).splitlines()[0] == said, name
    for call in products(randn(2, 8), weight).values():
        call()
    layer = ColumnParallelLinear(8, {"": 16}, kernels=resolve_kernels(DEVICE, True, ALL)).to(DEVICE)
    with pytest.raises(ValueError, match=r"x: expected torch.float32 \[..., 8\]"):
        layer(randn(2, 9))


# ---- token ids


@pytest.mark.parametrize("wrong", [-1, 5, 1 << 40])
def test_embedding_names_an_id_outside_of_the_table(provider, wrong):
    ids, weight = torch.tensor([4, 0, wrong], device=DEVICE), randn(5, 8)
    engine = resolve_kernels(DEVICE, True, {"embedding": [provider]}).embedding
    for call in (lambda: by(provider, "embedding", ids, weight), lambda: engine(ids, weight)):
        with pytest.raises(ValueError, match=f"token_ids: token 2 has id {wrong}, expected 0 to 4, the rows of weight"):
            call()


# ---- dtypes and gradients

WITH_PROVIDERS = [op for op in all_ops().values() if op.inputs is not None and len(op.providers) > 1]


@pytest.mark.parametrize("name", ["rms_norm", "attention_decode"])
def test_only_the_reference_computes_in_float64(name, monkeypatch, caplog):
    op = all_ops()[name]
    given = op.inputs(Tensors(torch.float64, DEVICE), op.inputs.small[1], op.inputs.variants[0])

    def never(*args, **kwargs):
        raise AssertionError("it was called")

    monkeypatch.setitem(op.providers, "mine", Provider("mine", never))
    said = "expected float32 or bfloat16 or float16, not float64"
    with (
        pytest.raises(ValueError, match=f"use\\('mine'\\): .* of {op.name} does not take .*: \\w+: {said}"),
        op.use("mine"),
    ):
        op(**op.records.group(given))
    monkeypatch.setenv("NANOVLLM_KERNELS", f"{op.name}=mine")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            op(**op.records.group(given))
    assert len([r for r in caplog.records if said in r.message and f"{op.name}: mine" in r.message]) == 1


def test_only_the_reference_has_a_backward_pass(monkeypatch):
    op = all_ops()["rms_norm"]
    seen = []

    def mine(x, weight, eps):
        seen.append(torch.is_grad_enabled())
        return op.native(x.detach(), weight, eps)

    monkeypatch.setitem(op.providers, "mine", Provider("mine", mine))
    x, weight = randn(2, 8).requires_grad_(), torch.ones(8, device=DEVICE)
    monkeypatch.setenv("NANOVLLM_KERNELS", "rms_norm=mine")
    y = kernels.rms_norm(x, weight, 1e-6)
    assert not seen and y.requires_grad
    y.sum().backward()
    assert x.grad is not None
    with (
        pytest.raises(ValueError, match="rms_norm does not take .*: x requires grad, and there is no backward pass"),
        op.use("mine"),
    ):
        op(x, weight, 1e-6)
    with pytest.raises(ValueError, match="weight requires grad"), op.use("mine"):
        op(x.detach(), torch.nn.Parameter(weight), 1e-6)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), op.use("mine"):
            op(x, weight, 1e-6)
    assert len(seen) == 2
    # A plugin's may have one.
    monkeypatch.setitem(op.providers, "mine", Provider("mine", mine, origin="a plugin"))
    with op.use("mine"):
        op(x, weight, 1e-6)
    assert len(seen) == 3


# ---- overlapping memory


def test_add_rms_norm_of_overlapping_memory(provider):
    weight = randn(8)
    for dtype in (torch.float32, torch.bfloat16):
        both, w = randn(6, 8, dtype=dtype), weight.to(dtype)
        for x, residual in ((0, 0), (0, 1), (1, 0), (0, 3), (3, 0)):
            memory = both.clone()
            x, residual = memory[x : x + 3], memory[residual : residual + 3]
            want = all_ops()["add_rms_norm"].native(x.clone(), residual.clone(), w, 1e-6)
            got = by(provider, "add_rms_norm", x, residual, w, 1e-6)
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b)


def check_that_add_rms_norm_is_in_place_otherwise():
    x, residual = randn(3, 8), randn(3, 8)
    y, new_residual = by("triton", "add_rms_norm", x, residual, randn(8), 1e-6)
    assert y.data_ptr() == x.data_ptr() and new_residual.data_ptr() == residual.data_ptr()


# ---- what is no tensor


def test_a_shape_that_differs_in_front_is_named_beside_the_first():
    with pytest.raises(ValueError) as error:
        kernels.add_rms_norm(randn(3, 8), randn(2, 8), randn(8), 1e-6)
    assert str(error.value) == (
        "add_rms_norm: residual: expected the shape [..., size] with size=8 as in x of shape [3, 8], not [2, 8]"
    )
    with pytest.raises(
        ValueError, match=r"b: expected the shape \[n\] \| \[..., n\] with n=8 as in a of shape \[3, 8\], not \[2, 8\]"
    ):
        kernels.element_wise_mul_add(randn(3, 8), randn(2, 8), randn(8))


def test_none_and_what_is_no_tensor():
    """The reference's annotations say what may be None."""
    for op in WITH_PROVIDERS:
        given = op.inputs(Tensors(torch.float32, DEVICE), op.inputs.small[1], op.inputs.variants[0])
        for name in op.check.patterns:
            optional = "None" in str(op.records.flat.parameters[name].annotation)
            for wrong in [3.0, [1.0]] + ([] if optional else [None]):
                with pytest.raises(ValueError, match=f"{op.name}: {name}: expected a tensor .*, not"):
                    op(**op.records.group({**given, name: wrong}))


@pytest.mark.parametrize("eps", [None, "1e-6", -1e-6, math.nan, torch.tensor(1e-6)], ids=str)
def test_eps(eps):
    x, w = randn(3, 8), randn(8)
    with pytest.raises(ValueError, match="rms_norm: eps: expected a number, at least 0, not"):
        kernels.rms_norm(x, w, eps)
    kernels.rms_norm(x, w, 1)


def test_an_odd_head_dim(provider):
    positions = torch.arange(2, device=DEVICE)
    q, k, table = randn(2, 4, 7), randn(2, 2, 7), randn(16, 7)
    norms = randn(7), randn(7), 1e-6
    engine = resolve_kernels(DEVICE, True, {"rotary_embedding": [provider]}).rotary_embedding
    for call in (
        lambda: by(provider, "rotary_embedding", positions, q, k, table),
        lambda: by(provider, "qk_norm_rope", positions, q, k, *norms, table),
        lambda: engine(positions, q, k, table),
    ):
        with pytest.raises(ValueError, match="q: head_dim must be even, not 7"):
            call()


# ---- sampling


def sampling(rows=3, vocab_size=10, **given):
    column = lambda v, dtype=torch.float32: torch.full((rows,), v, dtype=dtype, device=DEVICE)  # noqa: E731
    made = {
        "logits": randn(rows, vocab_size), "temperature": column(1.0), "top_k": None, "top_p": None, "min_p": None,
        "seeds": column(1, torch.int64), "positions": column(1, torch.int64),
    }  # fmt: skip
    for name, values in given.items():
        made[name] = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    return made


def test_sampling_from_an_empty_vocabulary(provider):
    with pytest.raises(
        ValueError, match=r"logits: expected \[rows, vocab_size\] with at least one column, not \[3, 0\]"
    ):
        by(provider, "sample", **sampling(vocab_size=0))


@pytest.mark.parametrize(
    "name, wrong, expected",
    [
        *(("temperature", v, "at least 0") for v in (-0.5, math.nan, -math.inf)),
        *((name, v, "0 to 1") for name in ("top_p", "min_p") for v in (-0.1, 1.5, math.nan, math.inf)),
    ],
)
def test_sampling_parameters_out_of_range(provider, name, wrong, expected):
    with pytest.raises(ValueError, match=f"{name}: row 1 has {float(torch.tensor(wrong))}, expected {expected}"):
        by(provider, "sample", **sampling(**{name: [0.5, wrong, 0.5]}))


def test_sampling_parameters_at_their_bounds(provider):
    ids = by(provider, "sample", **sampling(temperature=[0.0, 1e-3, 1e9], top_p=[0.0, 1.0, 0.5], min_p=[0.0, 1.0, 0.5]))
    assert ids.shape == (3,) and 0 <= int(ids.min()) and int(ids.max()) < 10


@pytest.mark.triton
@pytest.mark.parametrize(
    "check",
    [check_products, check_that_add_rms_norm_is_in_place_otherwise],
    ids=lambda f: f.__name__,
)
def test_triton(check):
    check()
