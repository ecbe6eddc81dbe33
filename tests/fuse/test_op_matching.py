"""Our ops are found where a graph writes out what they compute, only there, and give the same when they are put in
place.
"""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.fuse import FusionAnalyzer
from nanovllm.fuse.group_module import extract, values
from nanovllm.fuse.grouping import KernelGroup
from nanovllm.fuse.op_graph import build
from nanovllm.fuse.op_matching import find, packed_dtypes, patterns
from nanovllm.kernels import Tensors, all_ops

# The references of these depend on values, or the op declares no inputs; they stay ops of their own in a graph.
UNTRACED = {
    name
    for name, op in all_ops().items()
    if "attention" in name or name in ("sample", "moe_experts", "moe_experts_fp8") or op.inputs is None
}
# Their patterns draw random numbers, or depend on the shape or a count, and are not found again at another one.
BY_SHAPE = {"layernorm_residual_dropout_gelu", "moe_route"}
X, R, W = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)


def found(fn, *args):
    return {(m.op, len(m.kernels)) for m in find(build(fn, args))}


def whole(fn, *args):
    """Ops that do all of a function."""
    graph = build(fn, args)
    return {m.op for m in find(graph) if len(m.kernels) == len(graph)}


@pytest.mark.parametrize("name", sorted(set(all_ops()) - UNTRACED - BY_SHAPE))
def test_every_op_is_found_in_its_own_reference(name):
    """At a shape and with values that the pattern was not traced with; put in place, it gives the same."""
    declared = all_ops()[name]
    assert patterns(name, torch.float32), "its reference cannot be traced"
    shape = max((s for s in declared.inputs.small if 0 not in s), key=lambda s: (min(s) > 1, -sum(s)))
    for variant in declared.inputs.variants:
        arguments = declared.inputs(Tensors(torch.float32, torch.device("cpu"), seed=3), shape, variant)
        if "eps" in arguments:
            arguments["eps"] = 3e-3
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        fixed = {k: v for k, v in arguments.items() if k not in tensors}
        fn = _with(declared.native, fixed)
        graph = build(fn, (), tensors)
        matches = [m for m in find(graph) if m.op == name and len(m.kernels) == len(graph)]
        assert matches, f"not found: {[k.op for k in graph]}"
        if "eps" in arguments and arguments.get("q_weight", W) is not None:
            assert matches[0].arguments["eps"] == 3e-3
        group = KernelGroup(graph, graph.kernels)
        known = values(graph, (), {k: v.clone() for k, v in tensors.items()})
        plain, ours = extract(group), extract(group, matches[:1])
        assert any("nanovllm" in str(getattr(n.target, "__module__", "")) for n in ours.module.graph.nodes)
        results = [e.module(*(tensors[n.name].clone() for n in e.inputs)) for e in (plain, ours)]
        assert len(results[0]) == len(group.outputs) and len(known) > 0
        for a, b in zip(*results, strict=True):
            if a.dtype == torch.float8_e4m3fn:  # PyTorch compares these bit by bit alone
                a, b = a.float(), b.float()
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def _with(native, fixed):
    return lambda **tensors: native(**tensors, **fixed)


def test_patterns_of_every_dtype_and_none_where_values_decide():
    for name in UNTRACED:
        assert patterns(name, torch.bfloat16) == ()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert patterns("rms_norm", dtype)
    assert patterns("rms_norm", torch.int64) == ()


def test_ops_of_packed_weights_are_looked_for_where_there_are_any():
    """To trace their references takes a second, which a command on a module of floats need not wait."""
    packed = {"linear_int4", "linear_int8", "linear_gguf", "linear_fp8", "linear_fp8_dynamic"}
    for weight, dtype in ((torch.randn(4, 16), None), (torch.ones(4, 16, dtype=torch.uint8), torch.uint8)):
        said = []
        find(build(lambda x, w: F.linear(x, w.float()) + 1, (X, weight)), said.append)
        looked_for = {text.split()[2] for text in said}
        expected = {name for name in packed if packed_dtypes(name, torch.float32) <= {dtype}}
        assert looked_for & packed == expected and "linear" in looked_for
        assert bool(expected) == (dtype is not None)


def test_other_spellings():
    def norm(x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    assert whole(norm, X, W) == {"rms_norm"}
    assert whole(lambda x, w: (x * torch.rsqrt(1e-5 + x.square().mean(-1, True))) * w, X, W) == {"rms_norm"}
    assert whole(lambda x, w: F.rms_norm(x, (16,), w, 1e-5), X, W) == {"rms_norm"}
    assert whole(lambda x, r, w: norm(x + r, w), X, R, W) == {"add_rms_norm"}  # whose second result nobody reads then
    assert whole(lambda x, r, w: (norm(r + x, w), r + x), X, R, W) == set()  # the sum is computed twice there
    assert whole(lambda x, r, w: (lambda s: (norm(s, w), s))(x + r), X, R, W) == {"add_rms_norm"}
    assert "silu_and_mul" in whole(lambda g: F.silu(g[:, :8]) * g[:, 8:], X)
    assert "silu_and_mul" in whole(lambda g: (lambda a, b: (a * torch.sigmoid(a)) * b)(*g.split(8, -1)), X)
    assert "linear" in whole(lambda x, w, b: F.linear(x, w, b), X, torch.randn(3, 16), torch.randn(3))
    assert "linear_bias_act" in whole(lambda x, w: F.relu(F.linear(x, w)), X, torch.randn(3, 16))
    product, bias = torch.randn(24, 16), torch.randn(24)
    assert "linear_silu_and_mul" in whole(
        lambda x, w: (lambda g: g[:, 12:] * F.silu(g[:, :12]))(F.linear(x, w)), X, product
    )
    for given in (None, bias[:16]):
        fn = lambda x, r, w, n, b=given: (lambda s: (norm(s, n), s))(r + F.linear(x, w, b))  # noqa: E731
        (m,) = [m for m in find(build(fn, (X, R, product[:16], W))) if m.op == "linear_add_rms_norm"]
        assert (m.arguments.get("bias") is None) == (given is None)
    # More dimensions in front are more rows.
    assert whole(norm, torch.randn(2, 3, 16), W) == {"rms_norm"}


def test_what_only_looks_like_an_op():
    eps = 1e-6
    assert found(lambda x, w: w * (x * torch.rsqrt(x.square().mean(0, keepdim=True) + eps)), X, W) == set()  # columns
    assert found(lambda x, w: w * (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)), X, W) == set()  # a sum
    other = lambda x, w: w * (R * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))  # noqa: E731
    assert found(other, X, W) == set()
    column = torch.randn(5, 1)
    assert found(lambda x, w: w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)), X, column) == set()
    for fn in (lambda g: g[:, :8] * F.silu(g[:, 8:]), lambda g: F.silu(g[:, :4]) * g[:, 4:8]):  # exchanged; quarters
        assert "silu_and_mul" not in {n for n, _ in found(fn, X)}
    square = torch.randn(16, 16)  # here the mean of a row, without its dimension, is broadcast along the columns
    assert found(lambda x, w: w * (x * torch.rsqrt(x.square().mean(-1) + eps)), square, W) == set()
    assert "softmax" in whole(lambda x: torch.softmax(x, -1), X)
    assert "softmax" not in whole(lambda x: torch.softmax(x, 0), X)
    graph = build(lambda x: F.gelu(x, approximate="tanh"), (X,))
    (kind,) = {m.arguments["kind"] for m in find(graph) if m.op == "fused_activation"}
    assert kind == "gelu_tanh"


def test_two_norms_of_different_eps_are_not_one_op():
    def fn(q, k, positions, table, qw, kw, eps):
        def norm(x, w, e):
            return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + e))

        rope = all_ops()["rotary_embedding"].native
        return rope(positions, norm(q, qw, 1e-6), norm(k, kw, eps), table)

    q, k, table, weights = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(32, 8), torch.randn(2, 8)
    for eps in (1e-6, 1e-5):
        served = whole(lambda *args, eps=eps: fn(*args, eps), q, k, torch.arange(5), table, *weights)
        assert ("qk_norm_rope" in served) == (eps == 1e-6)


def test_what_is_needed_outside_keeps_an_op_from_replacing_it():
    def norm(x, w):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return w * y, y.sum()

    assert "rms_norm" not in {n for n, _ in found(norm, X, W)}


def test_a_group_is_served_by_several_ops_or_in_part():
    def fn(x, w, gate_up):
        y = F.rms_norm(x, (16,), w, 1e-6)
        g, u = F.linear(y, gate_up).chunk(2, -1)
        return torch.tanh(F.silu(g) * u)

    a = FusionAnalyzer(fn, (X, W, torch.randn(24, 16)), device="h100")
    everything = KernelGroup(a.graph, a.graph.kernels)
    served = a.served(everything)
    assert served.covered == len(everything.kernels) - 1 and "of 5 kernels" in str(served)
    one = next(g for g in (KernelGroup(a.graph, (k,)) for k in a.graph.kernels) if g.kernels[0].op == "silu")
    assert a.served(one).beyond and str(a.served(one)) == "fused_activation"
    tanh = KernelGroup(a.graph, a.graph.kernels[-1:])
    assert str(a.served(tanh)) == "none"


def test_an_op_of_ours_in_the_graph_serves_itself():
    graph = build(lambda x, w: torch.ops.nanovllm.rms_norm(x, w, 1e-6), (X, W))
    (m,) = find(graph)
    assert m.op == "rms_norm" and m.arguments["eps"] == 1e-6
