"""Patterns of fused ops in compiled models are found, counted, and replaced by what computes the same.

Most tests run the graph that Inductor has after the pass. A few have Inductor compile C++ code for the graph.
"""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, fake_tensor_prop
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from nanovllm.adapters.inductor import OPS, FusedOps, replacing
from nanovllm.adapters.inductor.fused_ops import InTurn, PassReport


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    # A precompiled header takes longer than the few files that would use it.
    with (
        config.patch(fx_graph_cache=False, cpp_cache_precompile_headers=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


def norm(x, weight, eps=1e-5):
    """As transformers' models write it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gate_up(x):
    gate, up = x.chunk(2, dim=-1)
    return up * F.silu(gate)


def sliced(x):
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def added(x, residual, weight):
    total = x + residual
    return norm(total, weight, 1e-6), total


def used_once(x, residual, weight):
    return F.rms_norm(x + residual, (16,), weight, 1e-6)


ROWS, ROW, WIDE = (2, 3, 16), (16,), (2, 3, 32)
CASES = {
    "rms_norm": [(norm, ROWS, ROW), (lambda x, w: F.rms_norm(x, (16,), w, 1e-6), ROWS, ROW)],
    "add_rms_norm": [(added, ROWS, ROWS, ROW), (used_once, ROWS, ROWS, ROW)],
    "silu_and_mul": [(gate_up, WIDE), (sliced, WIDE)],
    "fused_add_gelu": [
        (lambda x, b: F.gelu(b + x), ROWS, ROW),
        (lambda x, b: F.gelu(x + b, approximate="tanh"), ROWS, ROWS),
    ],
    "element_wise_mul_add": [(lambda a, b, c: c + a * b, ROWS, ROWS, ROW), (lambda a, b, c: b * a + c, ROWS, ROW, ROW)],
}


def without_code(graph, inputs, *, options):
    """A backend: Inductor up to its last passes."""

    def as_it_is(graph, inputs, **_):
        with V.set_fake_mode(fake_tensor_prop(graph, inputs)):
            _recursive_post_grad_passes(graph, is_inference=True)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=as_it_is, config_patches=options)


def compared(function, arguments, fused, backend=without_code, **tolerance):
    compiled = torch.compile(function, backend=backend, options=fused.options())
    with torch.no_grad():
        pairs = [compiled(*arguments), function(*arguments)]
    for mine, right in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in pairs)):
        torch.testing.assert_close(mine, right, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_each_pattern_is_replaced(dtype):
    """All in one graph, since compiling takes its time."""
    cases = [case for op in CASES.values() for case in op]
    arguments = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _, *shapes in cases]

    def every(*arguments):
        given, results = iter(arguments), []
        for function, *shapes in cases:
            result = function(*(next(given) for _ in shapes))
            results += [result] if isinstance(result, torch.Tensor) else result
        return tuple(results)

    fused = FusedOps(OPS, reference_too=True)
    compared(every, sum(arguments, []), fused, "inductor")
    assert fused.report().replaced == {op: len(found) for op, found in CASES.items()}
    assert fused.report().graphs == 1 and not fused.report().left


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(32)), nn.Parameter(torch.rand(32))
        self.up, self.down = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)
        self.mix = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        x = x + self.mix(norm(x, self.first))
        return x + self.down(gate_up(self.up(norm(x, self.second))))


def test_a_model_and_its_report():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).eval()
    fused = FusedOps(reference_too=True)
    x = torch.randn(5, 32)
    torch._dynamo.mark_dynamic(x, 0)
    compared(model, [x], fused)
    # The first norm has no sum before it; the sums before the others are parts of them.
    assert fused.report().replaced == {"add_rms_norm": 3, "rms_norm": 1, "silu_and_mul": 2}
    assert "add_rms_norm: 3 replaced" in str(fused.report())


def test_a_report_without_graphs_names_the_cache_and_says_nothing_of_patterns():
    said = str(PassReport({}, {}, 0))
    assert said.startswith("graphs compiled: 0 (") and "Inductor's cache" in said and "pattern" not in said
    assert str(PassReport({}, {}, 1)) == "graphs compiled: 1\nno pattern was found"


def test_where_only_the_reference_runs_nothing_is_replaced():
    fused = FusedOps()
    compared(norm, [torch.randn(3, 16), torch.randn(16)], fused)
    assert fused.report().replaced == {}
    assert fused.report().left == {("rms_norm", "only the reference runs on cpu"): 1}


def test_what_is_no_call_of_the_op_is_left():
    def several(x, wide, weight, few, many):
        return norm(x, wide), norm(wide, weight), F.gelu(few + many)

    arguments = [torch.randn(3, 16).bfloat16(), torch.randn(3, 16), torch.randn(3, 16), torch.randn(1, 16)]
    fused = FusedOps(reference_too=True)
    compared(several, [*arguments, torch.randn(4, 16)], fused)
    report = fused.report()
    assert report.replaced == {} and len(report.left) == 3
    said = sorted(reason for _, reason in report.left)
    assert said[0].startswith("a tensor [") and said[1] == "a tensor [3, 16] with one [3, 16]"
    assert said[2] == "tensors of several dtypes: bfloat16, float32"


def test_sums_with_a_factor_and_numbers_are_no_arguments_of_the_ops():
    """`torch.add(x, y, alpha=2)`, a number in the place of a tensor, and a size that varies."""

    def several(x, y, row):
        scaled = torch.add(x, y, alpha=2)
        products = torch.add(y, x * row, alpha=3), x * 2 + 1, x * x.shape[0] + row
        return norm(scaled, row), F.gelu(torch.add(x, row, alpha=2)), F.gelu(y + 1.5), norm(x, 1.5), *products

    fused = FusedOps(OPS, reference_too=True)
    x, y = torch.randn(3, 16), torch.randn(3, 16)
    for rows in (x, y):
        torch._dynamo.mark_dynamic(rows, 0)
    compared(several, [x, y, torch.randn(16)], fused)
    assert fused.report().replaced == {"rms_norm": 1}
    why = {reason for _, reason in fused.report().left}
    assert why == {"a sum with a factor (alpha)", "a number in the place of a tensor"}


def test_an_eps_that_is_no_constant():
    """With dynamic=True numbers of a model become inputs of its graph."""
    fused = FusedOps(reference_too=True)
    compiled = torch.compile(norm, backend=without_code, options=fused.options(), dynamic=True)
    arguments = torch.randn(3, 16), torch.randn(16), 1e-3
    torch.testing.assert_close(compiled(*arguments), norm(*arguments))
    ((op, why),) = fused.report().left
    assert op == "rms_norm" and why.startswith("eps is no constant") and not fused.report().replaced
    torch._dynamo.reset()
    assert "torch._dynamo.config.specialize_float = True" in why
    with torch._dynamo.config.patch(specialize_float=True):
        compiled = torch.compile(norm, backend=without_code, options=fused.options(), dynamic=True)
        torch.testing.assert_close(compiled(*arguments), norm(*arguments))
    assert fused.report().replaced == {"rms_norm": 1}


def test_a_value_that_is_kept_is_not_fused_away():
    def both(x, weight):
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(mean + 1e-6)).to(x.dtype), mean

    fused = FusedOps(reference_too=True)
    compared(both, [torch.randn(3, 16), torch.randn(16)], fused)
    assert fused.report().replaced == {}


@pytest.mark.slow
def test_gradients_are_right():
    weight = torch.rand(16, requires_grad=True)
    x = torch.randn(3, 16, requires_grad=True)
    fused = FusedOps(reference_too=True)
    torch.compile(norm, options=fused.options())(x, weight).square().sum().backward()
    got = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    norm(x, weight).square().sum().backward()
    for mine, right in zip(got, (x.grad, weight.grad)):
        torch.testing.assert_close(mine, right)


def test_only_the_ops_that_are_named():
    fused = FusedOps(["rms_norm"], reference_too=True)
    compared(added, [torch.randn(ROWS), torch.randn(ROWS), torch.randn(ROW)], fused)
    assert fused.report().replaced == {"rms_norm": 1}


class Counting(CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "counting"


def test_the_block_keeps_another_pass_and_restores_it():
    other = Counting()
    with config.patch(post_grad_custom_pre_pass=other):
        with replacing(reference_too=True) as fused:
            torch.compile(norm)(torch.randn(3, 16), torch.randn(16))
        assert config.post_grad_custom_pre_pass is other
    assert other.graphs == 1 and fused.report().replaced == {"rms_norm": 1}
    with pytest.raises(KeyError), replacing():
        raise KeyError
    assert config.post_grad_custom_pre_pass is None


def test_the_cache_tells_passes_apart():
    class Plain:
        def __call__(self, graph):
            pass

    assert FusedOps().uuid() == FusedOps().uuid() is not None
    kinds = [FusedOps(), FusedOps(["rms_norm"]), FusedOps(reference_too=True), InTurn(Counting(), FusedOps())]
    assert len({one.uuid() for one in kinds}) == 4
    assert InTurn(Plain(), FusedOps()).uuid() is None


def test_an_unknown_op():
    with pytest.raises(ValueError, match="'softmax' has no pattern; expected any of add_rms_norm"):
        FusedOps(["softmax"])


@pytest.mark.parametrize(
    "architecture, replaced",
    [
        ("Qwen3", {"add_rms_norm": 4, "rms_norm": 5}),
        ("Phi3", {"add_rms_norm": 4, "rms_norm": 1, "silu_and_mul": 2}),
        ("Gemma", {"add_rms_norm": 4, "rms_norm": 1}),
    ],
)
def test_whole_models(architecture, replaced):
    pytest.importorskip("transformers")
    from tests.adapters.models import prompts, shared

    model, fused = shared(architecture), FusedOps(reference_too=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=without_code, options=fused.options(), fullgraph=True)
    for length in (9, 13):  # the second graph has any length
        given = {"input_ids": prompts(length=length)["input_ids"], "use_cache": False}
        with torch.no_grad():
            expected = model(**given).logits
            torch.testing.assert_close(
                compiled(**given).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max())
            )
    assert fused.report().replaced == {op: 2 * n for op, n in replaced.items()} and not fused.report().left
