"""Which kernels become one, by hand."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.fuse import FusionAnalyzer, legality
from nanovllm.fuse.classify import PER_ELEMENT, Kind
from nanovllm.fuse.group_module import extract
from nanovllm.fuse.grouping import Grower, KernelGroup
from nanovllm.fuse.op_graph import build
from tests.fuse.modules import groups_of, run_in_order

X, W = torch.randn(8, 16), torch.randn(16)


WEIGHT = torch.randn(32, 16)
GROUPS = {
    # Chains, norms and softmax are one; readers of one value are one.
    "mul add relu": (lambda x: torch.relu(x * W + 1), X),
    "square mean add rsqrt mul mul": (lambda x: W * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)), X),
    "cumsum mul": (lambda x: x.cumsum(-1) * 2, X),
    "layer_norm mul": (lambda x: F.layer_norm(x, (16,)) * 2, X),
    "var add": (lambda x: x.var(-1, keepdim=True) + x, X),
    "relu tanh": (lambda x: (torch.relu(x), torch.tanh(x)), X),
    # A norm of a product needs all of its tiles; a norm before it and what dequantises a weight do not.
    "linear gelu": (lambda x: F.gelu(F.linear(x, WEIGHT)), X),
    "linear, layer_norm": (lambda x: F.layer_norm(F.linear(x, WEIGHT), (32,)), X),
    "layer_norm linear": (lambda x: F.linear(F.layer_norm(x, (16,)), WEIGHT), X),
    "to mul linear": (lambda x, w: F.linear(x, w.float() * 0.1), X, WEIGHT.to(torch.bfloat16)),
    "softmax, linear": (lambda x, w: F.linear(x, torch.softmax(w, -1)), X, WEIGHT),
    "linear relu, linear": (lambda x, a, b: F.linear(F.relu(F.linear(x, a)), b), X, WEIGHT, torch.randn(16, 32)),
    # A second consumer keeps a product by itself.
    "linear, sum relu": (lambda x: (lambda y: (y.sum(0), torch.relu(y)))(F.linear(x, WEIGHT)), X),
}  # fmt: skip


@pytest.mark.parametrize("expected", GROUPS)
def test_groups(expected):
    fn, *args = GROUPS[expected]
    assert [" ".join(group) for group in groups_of(fn, *args)] == expected.split(", ")


def test_a_softmax_that_is_written_out_is_one():
    def softmax(x):
        shifted = x - x.amax(-1, keepdim=True)
        return shifted.exp() / shifted.exp().sum(-1, keepdim=True)

    assert len(groups_of(softmax, X)) == 1


def test_a_sum_over_rows_ends_a_group():
    def fn(x):
        return torch.tanh(x * 2 - (x * 2).sum(0))

    # A single program could do it all. That is legal, and where there is much to do it is slow.
    assert legality.rows(list(build(fn, (X,)))) == 1
    large = torch.empty(4096, 4096, device="meta")
    groups = FusionAnalyzer(fn, (large,), device="h100").groups
    assert [[k.op for k in g.kernels] for g in groups] == [["mul", "sum"], ["mul", "sub", "tanh"]]


def test_a_row_of_one_may_be_a_column_of_the_other():
    for x in (X, torch.randn(8, 8)):
        assert legality.rows(list(build(lambda x: torch.softmax((x * 2).t(), -1), (x,)))) == 1
        assert legality.rows(list(build(lambda x: torch.softmax(x * 2, -1), (x,)))) == 8
    assert legality.rows(list(build(lambda x: x * 2 * (x + 1).sum(-1), (x,)))) == 1  # [8] lies along the columns
    assert legality.rows(list(build(lambda x: x * 2 * (x + 1).sum(-1, keepdim=True), (x,)))) == 8


def test_reductions_on_the_wrong_side_of_a_product():
    weight = torch.randn(16, 16)
    assert groups_of(lambda x, w: F.linear(torch.softmax(x, 0), w), X, weight) == [["softmax"], ["linear"]]
    for fn, reason in (
        (lambda x, w: F.linear(x, w).sum(-1), "sum_1 reduces over what linear computes in many tiles"),
        (lambda x, w: (x @ w) @ w, "matmul and matmul_1 are two matrix products"),
    ):
        graph = build(fn, (X, weight))
        assert legality.why_not(graph, graph.kernels) == reason


def test_an_expand_keeps_rows_where_they_are():
    """Twelve elements seen as twelve rows of three are other rows; a new dimension behind repeats within them."""
    x = torch.randn(4, 3)

    def count(fn):
        return legality.rows(list(build(fn, (x,))))

    assert count(lambda x: torch.tanh(x).expand(3, 4, 3).contiguous()) == 1
    assert count(lambda x: torch.tanh(x).expand_as(x.new_empty(3, 4, 3)).contiguous()) == 1
    assert count(lambda x: torch.tanh(x).unsqueeze(-1).expand(4, 3, 5).contiguous()) == 12
    assert count(lambda x: x.sum(-1, keepdim=True).expand(4, 3).contiguous()) == 4


def test_a_shape_is_no_argument():
    """What is only expanded as another value is does not wait for that value."""

    def fn(x, y):
        like = torch.cumsum(y, 0)
        return (x * 2).expand_as(like).contiguous() + 1, (x * 3).view_as(like[0]) * 5, like * 3

    args = torch.randn(6), torch.randn(6, 6)
    graph = build(fn, args)
    groups = Grower(graph).groups()
    run_in_order(graph, groups, args)
    for group in groups:
        assert {n.name for n in extract(group).inputs} == {r.base.name for r in group.reads}


def test_no_cycle():
    """x -> a -> product -> c, and a -> c: a and c cannot be one without the product."""

    def fn(x, w):
        a = x * 2
        return torch.softmax(F.linear(a, w), -1) + a.sum(-1, keepdim=True)

    graph = build(fn, (X, torch.randn(16, 16)))
    grower = Grower(graph)
    groups = grower.groups()
    assert any("linear" in [k.op for k in g.kernels] for g in groups)
    assert all(not ({"mul", "softmax"} <= {k.op for k in g.kernels}) for g in groups)


def test_what_writes_the_same_memory_keeps_its_order():
    def fn(cache, index, x):
        before = cache.sum()
        cache[index] = x
        return before + cache.sum()

    graph = build(fn, (torch.zeros(8, 16), torch.arange(4), torch.ones(4, 16)))
    (put,) = [k for k in graph if k.mutates]
    assert {n.name for n in put.after} == {"sum_1"}
    groups = Grower(graph).groups()
    at = {k.fx: i for i, g in enumerate(groups) for k in g.kernels}
    sums = [k for k in graph if k.op == "sum"]
    assert at[sums[0].fx] < at[put.fx] < at[sums[1].fx]


def test_memory_is_made_before_it_is_written_to():
    def fn(x, index, rows):
        made = x * 2
        made[index] = rows
        return made.sum(0)

    graph = build(fn, (X, torch.arange(3), torch.ones(3, 16)))
    by_op = {k.op: k for k in graph}
    assert by_op["mul"].fx in by_op["index_put_"].after and by_op["index_put_"].writes == {by_op["mul"].fx}
    assert by_op["mul"] in KernelGroup(graph, (by_op["mul"],)).outputs
    order = [k.op for g in Grower(graph).groups() for k in g.kernels]
    assert order.index("mul") < order.index("index_put_") < order.index("sum")


def test_kinds_and_bytes():
    graph = build(lambda x, w: F.linear(torch.softmax(x, -1) * w + x, torch.ones(4, 16)).t().contiguous(), (X, W))
    kinds = {k.op: k.kind for k in graph}
    assert kinds["softmax"] is Kind.REDUCTION and kinds["mul"] is Kind.BROADCAST and kinds["add"] is Kind.ELEMENTWISE
    assert kinds["linear"] is Kind.MATMUL and kinds["contiguous"] is Kind.INJECTIVE and kinds["ones"] is Kind.INJECTIVE
    by_op = {k.op: k for k in graph}
    assert by_op["softmax"].bytes == 2 * 4 * 8 * 16 and by_op["softmax"].reduced == (1,)
    assert by_op["mul"].bytes == 4 * (2 * 8 * 16 + 16)
    assert by_op["linear"].flops == 2 * 8 * 4 * 16 and by_op["linear"].sizes == (8, 4, 16)
    assert "t" not in by_op and "transpose" not in by_op  # a view runs no kernel
    group = KernelGroup(graph, tuple(k for k in graph if k.kind in PER_ELEMENT and k.op in ("mul", "add")))
    assert group.read_bytes == 4 * (8 * 16 + 16 + 8 * 16) and group.written_bytes == 4 * 8 * 16
    assert group.unfused_bytes == 4 * (2 * 8 * 16 + 16 + 3 * 8 * 16)


def test_expanded_memory_counts_once_and_a_table_by_its_rows():
    graph = build(lambda x: x.expand(1000, 8, 16) * 2, (X,))
    (mul,) = graph
    assert mul.bytes - mul.written_bytes == 4 * 8 * 16 and mul.written_bytes == 1000 * 4 * 8 * 16
    graph = build(lambda table, i: F.embedding(i, table) * 2, (torch.zeros(10**5, 16), torch.arange(8)))
    gather = next(iter(graph))
    assert gather.bytes - gather.written_bytes == 8 * 16 * 4 + 8 * 8
