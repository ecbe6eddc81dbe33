"""`torch.ops.nanovllm`: PyTorch's own checks of an operator, torch.compile without a graph break, and gradients, which
are those of the reference, or an error that says why not.
"""

import logging
import warnings

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from nanovllm import kernels
from nanovllm.kernels import Provider, all_ops
from nanovllm.kernels.testing.verify import Case

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EAGER = dict(fullgraph=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # PyTorch's word on an operator that it cannot differentiate.
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        yield


_OTHERS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(operator, args):
    """`torch.library.opcheck`. Of a schema with 8-bit floats nothing is checked: it compares, which PyTorch cannot."""
    tests = ("test_schema", *_OTHERS)
    if any(getattr(a, "dtype", None) == torch.float8_e4m3fn for a in args):
        tests = _OTHERS
    torch.library.opcheck(operator, tuple(args), test_utils=tests)


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def leaves(op, arguments):
    """The arguments by position; floats of 16 bits and more require grad, but for those that the op writes to."""
    arguments = {name: a.detach().clone() if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
    for name, a in arguments.items():
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.itemsize > 1 and name not in op.mutates:
            a.requires_grad_()
    return op.records.flat.bind(**arguments).args


def cases(op):
    # PyTorch's check of a schema cannot copy an empty view of a larger tensor; empty shapes are in test_verify.
    shapes = [s for s in op.inputs.small if 0 not in s[:1]][:2]
    for shape, variant in zip(shapes, (*op.inputs.variants, *op.inputs.variants)):
        yield Case(shape, torch.float32, variant).arguments(op, DEVICE)


def gradients(fn, op, arguments):
    """Of the sum of all results, written arguments too, by every argument that requires grad; None: there are none."""
    args = leaves(op, arguments)
    result = fn(*args)
    results = [result] if isinstance(result, torch.Tensor) else list(result or ())
    results += [a for name, a in zip(op.records.flat.parameters, args) if name in op.mutates]
    results = [r for r in results if r.requires_grad]
    if not results:
        return None
    generator = torch.Generator(DEVICE).manual_seed(1)
    total = sum((r * torch.randn(r.shape, generator=generator, device=DEVICE)).sum() for r in results)
    return torch.autograd.grad(
        total, [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad], allow_unused=True
    )


# One of each kind: of one argument, of several results, in place, with lengths on the host, random, without a gradient.
OF_EACH_KIND = {
    "rms_norm", "add_rms_norm", "store_kvcache", "attention_decode", "layernorm_residual_dropout_gelu",
    "apply_token_bitmask",
}  # fmt: skip
EXPORTED = sorted(name for name, op in all_ops().items() if op.exported)
ON_A_GPU = DEVICE.type == "cuda"
"""There PyTorch traces nothing that it does not trace on a CPU: those of each kind are enough."""


def some(names):
    """Those of each kind; where there is no GPU the others too, as slow tests."""
    chosen = [name for name in names if name in OF_EACH_KIND or not ON_A_GPU]
    return [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.slow) for name in chosen]


@pytest.mark.parametrize("name", EXPORTED)
def test_opcheck(name):
    op = all_ops()[name]
    *_, arguments = cases(op)  # the first of `linear_gguf` are of a kind whose decoding takes seconds to trace
    opcheck(getattr(torch.ops.nanovllm, name).default, op.records.flat.bind(**arguments).args)


@pytest.mark.parametrize("name", some(EXPORTED))
def test_gradients_are_those_of_a_plain_call(name):
    op = all_ops()[name]
    # The reference of attention asks for lengths on the host: torch.compile breaks the graph there.
    call = op.records.taking_fields(op)
    compiled = torch.compile(lambda *args: call(*args), fullgraph="attention" not in name, backend="aot_eager")
    # The reference of experts takes each expert's rows, as many as there are: torch.compile cannot trace its gradient.
    # Of those that `opcheck` traces below, it compares the gradients as well: one of each kind is compiled here.
    traced = name.startswith("moe_experts") or (name in TRACEABLE and name not in OF_EACH_KIND)
    ways = [getattr(torch.ops.nanovllm, name)] + ([] if traced else [compiled])
    for arguments in list(cases(op))[0 if name in OF_EACH_KIND else -1 :]:
        want = gradients(call, op, arguments)
        assert (want is None) == (name in ("sample", "apply_token_bitmask", "packed_to_fp8"))
        for fn in ways:
            got = gradients(fn, op, arguments)
            assert (got is None) == (want is None)
            for a, b in zip(got or (), want or ()):
                assert (a is None) == (b is None)
                if b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# Those of them that look at values, on a CPU, cannot be traced with symbolic shapes outside torch.compile.
TRACEABLE = sorted(
    name for name, op in all_ops().items() if op.exported and op.fake is None and "attention" not in name
)


@pytest.mark.parametrize("name", some(TRACEABLE))
def test_opcheck_of_arguments_that_require_grad(name):
    op = all_ops()[name]
    for arguments in list(cases(op))[0 if name in OF_EACH_KIND else -1 :]:
        opcheck(getattr(torch.ops.nanovllm, name).default, leaves(op, arguments))


class Block(torch.nn.Module):
    """Both ways to call an op, and one with two results, between operators of PyTorch."""

    def __init__(self):
        super().__init__()
        self.norm, self.matrix = torch.nn.Parameter(randn(16)), torch.nn.Parameter(randn(32, 16))

    def forward(self, x, residual):
        y, residual = kernels.add_rms_norm(x * 2, residual + 1, self.norm, 1e-6)
        y = torch.ops.nanovllm.silu_and_mul(kernels.linear(y, self.matrix))
        return kernels.softmax(y) * residual


@pytest.mark.slow
def test_training_a_module_with_the_default_backend():
    block, x, residual = Block().to(DEVICE), randn(5, 16), randn(5, 16)
    wanted = [x.requires_grad_(), *block.parameters()]
    for args in ((x, residual), (randn(7, 16).requires_grad_(), residual[:1].expand(7, 16))):
        wanted[0] = args[0]
        want = torch.autograd.grad(block(*args).square().sum(), wanted)
        got = torch.autograd.grad(torch.compile(block, fullgraph=True)(*args).square().sum(), wanted)
        for a, b in zip(got, want):
            # The gradient of softmax is a difference of large terms: its error goes with the largest, not with the
            # result.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, b.abs().max().item()))


def test_only_a_graph_for_training_is_the_references():
    """Without gradients the operator stays one, so that the provider that is chosen runs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    block, args = Block().to(DEVICE), (randn(5, 16), randn(5, 16))
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = compiled(*args)
            assert not got.requires_grad
            torch.testing.assert_close(got, block(*args))
        assert [t for t in graphs.pop() if "nanovllm" in t] == [
            f"nanovllm.{name}.default" for name in ("add_rms_norm", "linear", "silu_and_mul", "softmax")
        ]
    assert compiled(*args).requires_grad
    assert len(graphs) == 1 and not [t for t in graphs[0] if "nanovllm" in t]


def test_export_of_a_module_with_trainable_parameters_keeps_the_ops():
    block, args = Block().to(DEVICE), (randn(5, 16), randn(5, 16))
    program = torch.export.export(block, args)
    assert len([node for node in program.graph.nodes if "nanovllm" in str(node.target)]) == 4
    torch.autograd.grad(program.module()(*args).sum(), list(program.parameters()), allow_unused=True)


def test_second_derivatives_and_function_transforms():
    x = torch.randn(3, 8, dtype=torch.float64)
    softmax = torch.ops.nanovllm.softmax
    assert torch.autograd.gradgradcheck(softmax, (x.clone().requires_grad_(),))
    for fn in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        got, want = (fn(lambda x, f=f: f(x).square().sum())(x) for f in (softmax, lambda x: torch.softmax(x, -1)))
        torch.testing.assert_close(got, want)


@pytest.fixture
def mine(monkeypatch):
    """rms_norm's provider `mine`, which has no backward pass, named by the environment: a list of its calls."""
    op, calls = all_ops()["rms_norm"], []

    def fn(x, weight, eps):
        calls.append(x.requires_grad)
        return op.native(x.detach(), weight.detach(), eps)

    def declare(origin):
        monkeypatch.setitem(op.providers, "mine", Provider("mine", fn, origin=origin))
        op.resolved_calls.clear()
        return calls

    monkeypatch.setenv("NANOVLLM_KERNELS", "rms_norm=mine")
    yield declare
    op.resolved_calls.clear()


@pytest.mark.parametrize(
    "origin, lacks",
    [(None, "there is no backward pass;"), ("a plugin", "there is no backward pass that torch.compile")],
)
def test_a_provider_yields_to_the_reference_for_gradients_alone(mine, origin, lacks, caplog):
    """A plugin's provider may have a backward pass, but not one that can be traced."""
    calls, op = mine(origin), all_ops()["rms_norm"]
    x, weight = randn(2, 8).requires_grad_(), torch.ones(8, device=DEVICE)
    compiled = torch.compile(lambda x, weight: kernels.rms_norm(x, weight, 1e-6), **EAGER)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(x, weight), op.native(x, weight, 1e-6))
    assert len(calls) == 2 and not [r for r in caplog.records if r.name.startswith("nanovllm")]
    with caplog.at_level(logging.WARNING):
        (got,) = torch.autograd.grad(compiled(x, weight).square().sum(), x)
        compiled(x, weight)
    torch.testing.assert_close(got, torch.autograd.grad(op.native(x, weight, 1e-6).square().sum(), x)[0])
    assert len(calls) == 2
    said = [r.message for r in caplog.records if "rms_norm: mine does not take these arguments" in r.message]
    assert len(said) == 1 and f"x requires grad, and {lacks}" in said[0]
    torch._dynamo.reset()
    with (
        pytest.raises(Exception, match=r"use\('mine'\): .* of rms_norm does not take .*: x requires grad"),
        op.use("mine"),
    ):
        compiled(x, weight)
    if origin is not None:
        with pytest.raises(
            RuntimeError, match="does not require grad"
        ):  # as it is called, whatever it then makes of it
            torch.autograd.grad(torch.ops.nanovllm.rms_norm(x, weight, 1e-6).sum(), x)
        assert calls[2:] == [True]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the reference asks for lengths on a CPU")
def test_what_cannot_be_traced_says_so():
    op = all_ops()["attention_decode"]
    args, call = leaves(op, next(cases(op))), op.records.taking_fields(op)
    compiled = torch.compile(lambda *args: call(*args), **EAGER)
    with pytest.raises(
        Exception,
        match=r"attention_decode requires grad here, .* call it under torch.no_grad\(\), or where the graph may break",
    ):
        compiled(*args)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), call(*args))


def test_arguments_are_checked_when_a_graph_for_training_is_traced():
    compiled = torch.compile(lambda x, weight: kernels.rms_norm(x, weight, 1e-6), **EAGER)
    with pytest.raises(Exception, match=r"rms_norm: weight: expected the shape \[size\] with size=8, not \[1\]"):
        compiled(randn(2, 8).requires_grad_(), randn(1))


@pytest.mark.parametrize("grad", [False, True])
def test_no_result_is_an_argument(grad):
    """Where the op says that it may be: the operator is functional."""
    x = randn(3, 8).requires_grad_(grad)
    _, residual = torch.ops.nanovllm.add_rms_norm_linear(x, None, randn(8), 1e-6, randn(6, 8))
    assert residual.data_ptr() != x.data_ptr() and residual.requires_grad == grad and torch.equal(residual, x)


def test_keyword_only_parameters_and_defaults():
    @kernels.op
    def scaled_here(x: torch.Tensor, y: torch.Tensor | None = None, *, by: float = 2.0) -> torch.Tensor:
        return x * by if y is None else x * y * by

    x, y = randn(3).requires_grad_(), randn(3)
    for fn in (
        torch.ops.nanovllm.scaled_here,
        torch.compile(lambda *args, **more: scaled_here(*args, **more), **EAGER),
    ):
        for args, more, want in (
            ((x,), {}, 2.0),
            ((x,), {"by": 3.0}, 3.0),
            ((x, y), {"by": 3.0}, 3 * y),
            ((x,), {"y": y}, 2 * y),
        ):
            (got,) = torch.autograd.grad(fn(*args, **more).sum(), x)
            torch.testing.assert_close(got, torch.as_tensor(want, device=DEVICE).expand(3))
            with torch.no_grad():
                torch.testing.assert_close(fn(*args, **more), x * want)


def test_tensors_in_a_list():
    @kernels.op
    def added_here(x: list[torch.Tensor]) -> torch.Tensor:
        return x[0] + 2 * x[1]

    x, y = randn(3), randn(3).requires_grad_()
    for fn in (torch.ops.nanovllm.added_here, torch.compile(lambda x: added_here(x), **EAGER)):
        (got,) = torch.autograd.grad(fn([x, y]).sum(), y)
        assert torch.equal(got, torch.full_like(y, 2))


@pytest.mark.parametrize("provider", ["native", pytest.param("triton", marks=pytest.mark.triton)])
def test_the_operator_leaves_its_arguments_alone_and_checks_them(provider):
    """`add_rms_norm` may reuse its arguments' memory; the operator asks a provider that `takes_fresh` not to."""
    assert all_ops()["add_rms_norm"].providers[provider].takes_fresh == (provider == "triton")
    x, residual, weight = randn(3, 8), randn(3, 8), randn(8)
    before = x.clone(), residual.clone()
    with all_ops()["add_rms_norm"].use(provider):
        y, total = torch.ops.nanovllm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    torch.testing.assert_close(total, x + residual)
    assert y.data_ptr() != x.data_ptr() and total.data_ptr() != residual.data_ptr()
    with pytest.raises(ValueError, match="weight: expected the shape"):
        torch.ops.nanovllm.rms_norm(x, weight[:3], 1e-6)


def test_an_op_of_ones_own_program_is_there_too(caplog):
    """Declared where it is used, not in a plugin; one without annotations works, but not under torch.compile."""

    @kernels.op
    def tripled_here(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @kernels.op
    def bare_here(x):
        return x * 4

    x = torch.randn(5, device=DEVICE)
    assert torch.equal(torch.ops.nanovllm.tripled_here(x), x * 3)
    assert torch.equal(torch.compile(lambda x: tripled_here(x) + 1, fullgraph=True, backend="eager")(x), x * 3 + 1)
    assert torch.equal(bare_here(x), x * 4) and "'bare_here' is not in torch.ops.nanovllm" in caplog.text
