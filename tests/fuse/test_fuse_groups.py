"""Groups of random graphs: run one after the other they give what the graph gives, and what a fused kernel must not
do they do not.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.fuse import FusionAnalyzer, legality
from nanovllm.fuse.classify import PER_ELEMENT, Kind
from nanovllm.fuse.group_module import extract, values
from nanovllm.fuse.grouping import Group, Grower
from nanovllm.fuse.op_graph import build

ROWS, SIZE = 4, 6


# Each takes two values and gives a new one, or fails or gives None if they do not fit.
OPS = [
    torch.add, torch.mul, lambda a, b: torch.maximum(a, b) - b,
    lambda a, b: torch.tanh(a), lambda a, b: F.gelu(a), lambda a, b: a * 0.5 + 1,
    lambda a, b: a.double().mean(-1, keepdim=True).float(),
    lambda a, b: a.sum(0) if a.dim() > 1 else None,
    lambda a, b: a.sum(0, keepdim=True), lambda a, b: a.amax(-1),
    lambda a, b: torch.softmax(a, -1), lambda a, b: torch.softmax(a, 0),
    lambda a, b: F.layer_norm(a, a.shape[-1:]), lambda a, b: torch.cumsum(a, 0),
    lambda a, b: a.t() if a.dim() == 2 else None,
    lambda a, b: a.reshape(-1), lambda a, b: a.reshape(a.shape[0], -1,
    2) if a.shape[-1] % 2 == 0 and a.dim() == 2 else None,
    lambda a, b: a.flatten(0, 1) if a.dim() == 3 else None,
    lambda a, b: a.transpose(0, 1) if a.dim() == 3 else None,
    lambda a, b: a[..., : a.shape[-1] // 2] if a.shape[-1] > 1 else None,
    lambda a, b: a[1:] if a.shape[0] > 1 else None,
    lambda a, b: a.unsqueeze(1), lambda a, b: a.chunk(2, -1)[1] if a.shape[-1] % 2 == 0 else None,
    lambda a, b: torch.cat((a, b), -1) if a.shape[:-1] == b.shape[:-1] and a.dim() == b.dim() else None,
    lambda a, b: torch.cat((a, b), 0) if a.shape[1:] == b.shape[1:] and a.dim() == b.dim() else None,
    lambda a, b: a.index_put((torch.arange(a.shape[0]).flip(0),), b) if a.shape == b.shape else None,
    lambda a, b: a.clone().index_put_((torch.arange(a.shape[0] - 1),), b[1:]) if a.shape == b.shape else None,
    lambda a, b: torch.roll(a, 1, -1), lambda a, b: torch.flip(a, (0,)),
    lambda a, b: a.repeat(2, *([1] * (a.dim() - 1))), lambda a, b: a.index_select(0, torch.arange(a.shape[0]).flip(0)),
    lambda a, b: F.linear(a, b) if b.dim() == 2 and a.dim() > 1 and a.shape[-1] == b.shape[-1] else None,
    lambda a, b: a @ b if a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] else None,
    lambda a, b: a.mul_(1.5) if a.dim() == 1 else a.clone().add_(1), lambda a,
    b: a.add_(b) if a.shape == b.shape else None,
    lambda a, b: a.tanh_(), lambda a, b: a.sub_(a.mean(-1, keepdim=True)), lambda a,
    b: a.add_(b.t()) if b.dim() == 2 else None,
    lambda a, b: a.swapdims(0, 1) if a.dim() > 1 else None, lambda a, b: a.tensor_split(2)[0] if a.dim() else None,
    lambda a, b: a.expand(3, *a.shape).contiguous(),
]  # fmt: skip


class Steps(torch.nn.Module):
    """Applies ops to an ever longer list of values; the last ones are returned."""

    def __init__(self, steps, keep, args):
        super().__init__()
        self.keep = keep
        self.weight = torch.nn.Parameter(torch.randn(SIZE), requires_grad=False)
        self.matrix = torch.nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.steps = []
        found = self.first(*(a.clone() for a in args))
        for op, a, b in steps:
            # Mostly of the latest, so that chains grow.
            step = op, (len(found) - 1 - a) % len(found), (len(found) - 1 - b) % len(found)
            try:
                made = self.apply_step(step, found)
            except (RuntimeError, IndexError):
                continue
            if made is not None and 0 < made.numel() <= 2048:
                self.steps.append(step)
                found.append(made)

    def first(self, x, y):
        return [x * 1.0, y, self.weight * 1.0, self.matrix * 1.0]

    @staticmethod
    def apply_step(step, found):
        op, a, b = step
        return OPS[op](found[a], found[b])

    def forward(self, x, y):
        found = self.first(x, y)
        for step in self.steps:
            found.append(self.apply_step(step, found))
        return tuple(found[-self.keep :])


_steps = st.lists(
    st.tuples(st.integers(0, len(OPS) - 1), st.sampled_from([0, 0, 0, 1, 2, 4]), st.integers(0, 6)),
    min_size=3,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(_steps, st.integers(1, 2), st.integers(0, 1000))
@example([(0, 0, 0), (19, 4, 0), (27, 0, 0), (34, 0, 0)], 1, 0)  # 12 elements expanded to 12 rows of 3: other rows
def test_random_graphs(steps, keep, seed):
    torch.manual_seed(seed)
    args = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)
    module = Steps(steps, keep, args)
    graph = build(module, args)
    groups = Grower(graph).groups()
    assert sorted(k.index for g in groups for k in g.kernels) == list(range(len(graph)))
    _run_in_order(graph, groups, args)
    for group in groups:
        reason = legality.why_not(graph, group.kernels)
        assert reason is None, reason
        if len(group.kernels) > 1 and not any(k.mutates for k in group.kernels):
            _stays_where_it_belongs(graph, group, args)


def _run_in_order(graph, groups, args):
    """Every group as a module, one after the other, each on what those before have made: the graph's own results."""
    found = values(graph, [a.clone() for a in args], {})
    outside = {n: found[n] for n in graph.program.graph.nodes if n.op in ("placeholder", "get_attr")}
    fresh = dict(zip((n for n in graph.inputs if n.name in graph.program.graph_signature.user_inputs), args))
    made = {n: fresh[n].clone() if n in fresh else v.clone() for n, v in outside.items()}
    for group in groups:
        part = extract(group)
        assert set(part.inputs) <= set(made), "a group needs what comes later: a cycle"
        results = part.module(*(made[n] for n in part.inputs))
        made.update(zip((k.fx for k in group.outputs), results))
    for base in graph.returned:
        torch.testing.assert_close(made[base], found[base], rtol=1e-5, atol=1e-5)


def _stays_where_it_belongs(graph, group, args):
    """Change one row (with a product: one element of it) of a member's result: no member may change in another one."""
    members = list(group.kernels)
    product = group.product
    if product is None:
        count = legality.rows(members)
        changed, later = members, members
    else:
        count = product.sizes[0]
        before, after = legality.parts(members, product)
        changed, later = [k for k in before if k.fx not in _weights(product, before)] + [product], [product, *after]
    row = count - 1
    for k in changed:
        if k.constant or k.fx.meta["val"].numel() % count:
            continue

        def run(poke, k=k):
            seen = {}

            class Poked(torch.fx.Interpreter):
                def run_node(self, n):
                    out = super().run_node(n)
                    if poke and n is k.fx:
                        out = out.clone()
                        flat = out.reshape(count, -1)
                        flat[row, -1] += 3.0
                        out = flat.reshape(out.shape)
                    seen[n] = out.clone() if isinstance(out, torch.Tensor) else out  # it may be written to later
                    return out

            inputs = values(graph, [a.clone() for a in args], {})
            with torch.no_grad():
                Poked(graph.program.graph_module).run(*(inputs[n].clone() for n in graph.inputs))
            return seen

        plain, poked = run(False), run(True)
        # Only changes that reach a member through members count: what leaves the group comes back in a later one.
        reached = {k.fx}
        for other in members:
            if any(r.base in reached for r in other.reads):
                reached.add(other.fx)
        for other in later:
            if other.fx not in reached or other is k or other.constant or other.op == "index_put_":
                continue
            differs = (plain[other.fx] != poked[other.fx]).reshape(count, -1).any(-1)
            assert not differs[:row].any(), f"row {row} of {k.name} reaches other rows of {other.name} in {group.name}"


def _weights(product, before):
    right = legality.matmul_operands(product.fx)[1]
    found = legality.operand_side(right, product, {k.fx: k for k in before})
    return {k.fx for k in found}


# ----------------------------------------------------------------------------------------------------------- by hand


def groups_of(fn, *args):
    return [[k.op for k in g.kernels] for g in Grower(build(fn, args)).groups()]


X, W = torch.randn(8, 16), torch.randn(16)


def test_pointwise_chains_norms_and_softmax_are_one():
    assert groups_of(lambda x, w: torch.relu(x * w + 1), X, W) == [["mul", "add", "relu"]]
    norm = groups_of(lambda x, w: w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)), X, W)
    assert len(norm) == 1 and norm[0][:2] == ["square", "mean"]
    soft = groups_of(
        lambda x: (x - x.amax(-1, keepdim=True)).exp() / (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True), X
    )
    assert len(soft) == 1


def test_a_sum_over_rows_ends_a_group():
    def fn(x):
        return torch.tanh(x * 2 - (x * 2).sum(0))

    # A single program could do it all. That is legal, and where there is much to do it is slow.
    assert legality.rows(list(build(fn, (X,)))) == 1
    large = torch.empty(4096, 4096, device="meta")
    groups = FusionAnalyzer(fn, (large,), device="h100").groups
    assert [[k.op for k in g.kernels] for g in groups] == [["mul", "sum"], ["mul", "sub", "tanh"]]
    # A row of one is a column of the other.
    assert legality.rows(list(build(lambda x: torch.softmax((x * 2).t(), -1), (X,)))) == 1
    assert legality.rows(list(build(lambda x: torch.softmax(x * 2, -1), (X,)))) == 8


def test_epilogues_and_prologues():
    weight = torch.randn(32, 16)
    assert groups_of(lambda x, w: F.gelu(F.linear(x, w)), X, weight) == [["linear", "gelu"]]
    # A norm of the product's rows needs all of its tiles.
    assert groups_of(lambda x, w: F.layer_norm(F.linear(x, w), (32,)), X, weight) == [["linear"], ["layer_norm"]]
    assert groups_of(lambda x, w: F.linear(F.layer_norm(x, (16,)), w), X, weight) == [["layer_norm", "linear"]]
    # The dequantisation of the right operand.
    assert groups_of(lambda x, w: F.linear(x, w.float() * 0.1), X, weight.to(torch.bfloat16)) == [
        ["to", "mul", "linear"]
    ]
    assert groups_of(lambda x, w: F.linear(x, torch.softmax(w, -1)), X, weight) == [["softmax"], ["linear"]]


def test_a_square_is_not_its_transpose():
    x = torch.randn(8, 8)
    assert legality.rows(list(build(lambda x: torch.softmax((x * 2).t(), -1), (x,)))) == 1
    assert legality.rows(list(build(lambda x: torch.softmax(x * 2, -1), (x,)))) == 8
    assert legality.rows(list(build(lambda x: x * 2 * (x + 1).sum(-1), (x,)))) == 1  # [8] lies along the columns
    assert legality.rows(list(build(lambda x: x * 2 * (x + 1).sum(-1, keepdim=True), (x,)))) == 8


def test_reductions_on_the_wrong_side_of_a_product():
    weight = torch.randn(16, 16)
    assert groups_of(lambda x, w: F.linear(torch.softmax(x, 0), w), X, weight) == [["softmax"], ["linear"]]
    graph = build(lambda x, w: F.linear(x, w).sum(-1), (X, weight))
    assert "sum_1 reduces over what linear computes in many tiles" == legality.why_not(graph, graph.kernels)
    assert "two matrix products" in legality.why_not(
        *(lambda g: (g, g.kernels))(build(lambda x, w: (x @ w) @ w, (X, weight)))
    )


def test_a_second_consumer_keeps_a_product_by_itself():
    weight = torch.randn(32, 16)
    (first, *rest) = groups_of(lambda x, w: (lambda y: (y.sum(0), torch.relu(y)))(F.linear(x, w)), X, weight)
    assert first == ["linear"] and len(rest) >= 1


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
    _run_in_order(graph, groups, args)
    for group in groups:
        assert {n.name for n in extract(group).inputs} == {r.base.name for r in group.reads}


def test_two_products_are_two():
    a, b = torch.randn(32, 16), torch.randn(16, 32)
    assert groups_of(lambda x, a, b: F.linear(F.relu(F.linear(x, a)), b), X, a, b) == [["linear", "relu"], ["linear"]]


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


def test_readers_of_one_value_are_one():
    assert groups_of(lambda x: (torch.relu(x), torch.tanh(x)), X) == [["relu", "tanh"]]


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
    assert by_op["mul"] in Group(graph, (by_op["mul"],)).outputs
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
    group = Group(graph, tuple(k for k in graph if k.kind in PER_ELEMENT and k.op in ("mul", "add")))
    assert group.read_bytes == 4 * (8 * 16 + 16 + 8 * 16) and group.written_bytes == 4 * 8 * 16
    assert group.unfused_bytes == 4 * (2 * 8 * 16 + 16 + 3 * 8 * 16)


def test_expanded_memory_counts_once_and_a_table_by_its_rows():
    graph = build(lambda x: x.expand(1000, 8, 16) * 2, (X,))
    (mul,) = graph
    assert mul.read_bytes == 4 * 8 * 16 and mul.written_bytes == 1000 * 4 * 8 * 16
    graph = build(lambda table, i: F.embedding(i, table) * 2, (torch.zeros(10**5, 16), torch.arange(8)))
    gather = next(iter(graph))
    assert gather.read_bytes <= 8 * 16 * 4 + 8 * 8 + 10**5 * 16 * 4  # at most; the rows are what is counted below
    assert gather.read_bytes == 8 * 16 * 4 + 8 * 8


@pytest.mark.parametrize(
    "fn", [lambda x: x.cumsum(-1) * 2, lambda x: F.layer_norm(x, (16,)) * 2, lambda x: x.var(-1, keepdim=True) + x]
)
def test_reductions_of_rows_take_their_consumers_in(fn):
    assert len(groups_of(fn, X)) == 1


# -------------------------------------------------------------------------------------------------- memory and views


def left_of(fn, *args):
    """(what the groups are, why the merges that were left were)."""
    analyzer = FusionAnalyzer(fn, args, device="h200")
    return [[k.op for k in g.kernels] for g in analyzer.groups], [d.reason for d in analyzer.decisions if not d.made]


def _written_first(which):
    def fn(a, w):
        (a, w)[which].mul_(2)
        return F.linear(a, w)

    return fn


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("rows", [8, 64])
def test_what_is_written_in_place_is_no_prologue(which, rows):
    """Every tile of the product would write it again, while others read it."""
    groups, reasons = left_of(_written_first(which), torch.randn(rows, 256), torch.randn(512, 256))
    assert groups == [["mul_"], ["linear"]]
    assert reasons == ["mul_ writes memory in place, and before linear every tile of it would do so again"]

    def fn(a, w):  # memory that only the kernel sees is registers
        return F.linear(torch.exp(a).mul_(2), w)

    assert left_of(fn, torch.randn(8, 256), torch.randn(512, 256))[0] == [["exp", "mul_", "linear"]]


_TURNS = {
    "t": lambda u: u.t(), "T": lambda u: u.T, "H": lambda u: u.H, "mT": lambda u: u.mT, "mH": lambda u: u.mH,
    "adjoint": lambda u: u.adjoint(), "swapdims": lambda u: u.swapdims(0, 1), "swapaxes": lambda u: u.swapaxes(0, 1),
    "moveaxis": lambda u: u.moveaxis(0, 1), "movedim": lambda u: u.movedim(0, 1), "permute": lambda u: u.permute(1, 0),
    "einsum": lambda u: torch.einsum("ij->ji", u), "as_strided": lambda u: u.as_strided(u.shape, (1, u.shape[0])),
    "unknown": lambda u: u.unfold(0, u.shape[0], 1)[0],
}  # fmt: skip


@pytest.mark.parametrize("turn", _TURNS.values(), ids=_TURNS)
def test_however_a_square_is_turned_its_rows_are_others(turn):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert legality.rows(list(build(lambda x: torch.softmax(turn(x * 2), -1), (x,)))) in (1, None)
    # As a prologue and as an epilogue.
    assert left_of(lambda x, w: F.linear(turn(torch.softmax(x, -1)), w), x, w)[0] == [["softmax"], ["linear"]]
    assert left_of(lambda x, w: (lambda y: turn(y) + y)(F.linear(x, w)), x, w)[0] == [["linear"], ["add"]]


def test_an_unknown_view_that_changes_nothing_keeps_rows():
    x = torch.randn(8, 8)
    assert legality.rows(list(build(lambda x: torch.softmax((x * 2).as_strided((8, 8), (8, 1)), -1), (x,)))) == 8


def test_the_number_of_sections_is_no_dimension():
    x = torch.randn(8, 2, 64)

    def fn(x, dim=0):
        first, second = torch.tensor_split(torch.exp(x), 2, dim)
        return first * 2 + second

    assert legality.rows(list(build(fn, (x,)))) == 1
    assert legality.rows(list(build(lambda x: fn(x, -1), (x,)))) == 16
    assert legality.rows(list(build(lambda x: fn(x, dim=2), (x,)))) == 16
    # By name, and where a slice is given no dimension at all.
    assert legality.rows(list(build(lambda x: torch.chunk(torch.exp(x), chunks=2)[0] * 2, (x,)))) == 1


def test_a_chain_in_place_is_one_kernel_that_writes_once():
    groups = Grower(build(lambda x: x.mul_(2).add_(1), (X.clone(),))).groups()
    assert [[k.op for k in g.kernels] for g in groups] == [["mul_", "add_"]]
    assert groups[0].written_bytes == groups[0].read_bytes == 4 * X.numel()

    (chain,) = Grower(build(lambda x: torch.exp(x).add_(1).mul_(2).sin_(), (X,))).groups()
    (plain,) = Grower(build(lambda x: torch.exp(x).add(1).mul(2).sin(), (X,))).groups()
    assert [k.op for k in chain.kernels] == ["exp", "add_", "mul_", "sin_"] and [k.op for k in chain.outputs] == [
        "sin_"
    ]
    assert (chain.read_bytes, chain.written_bytes) == (plain.read_bytes, plain.written_bytes)

    graph = build(lambda x: (lambda u: (torch.flip(u, (0,)), u.add_(1)))(torch.exp(x)), (X,))
    group = Group(graph, tuple(k for k in graph if k.op != "flip"))  # two results in the same memory
    assert len(group.outputs) == 2 and group.written_bytes == 4 * X.numel()

    def halves(x):  # two parts of one memory
        u, v = x.chunk(2, -1)
        return u.mul_(2) + v.mul_(3)

    graph = build(halves, (X.clone(),))
    assert sum(g.written_bytes for g in Grower(graph).groups()) == 4 * (X.numel() + X.numel() // 2)


def test_what_other_programs_read_is_not_written():
    x = torch.randn(8, 8)
    cases = {
        "use the same memory through different views": lambda x: x.add_(x.t() * 2),
        "uses memory that other programs": lambda x: x.add_(torch.flip(x, (0,))),
        "writes memory that linear reads in many tiles": lambda x: x.add_(F.linear(x, W8)),
        "reads for many tiles of linear": lambda x: x.add_(F.linear(torch.softmax(x, -1), W8)),
        "in an order that a fused kernel does not keep": lambda x: (x * 2, x.add_(1)),
    }
    for said, fn in cases.items():
        graph = build(fn, (x.clone(),))
        assert said in legality.why_not(graph, graph.kernels), said
        _run_in_order(graph, Grower(graph).groups(), [x])
    graph = build(lambda x: x.sub_(x.mean(-1, keepdim=True)), (x.clone(),))
    assert legality.why_not(graph, graph.kernels) is None and legality.rows(list(graph)) == 8
    graph = build(lambda x, row: x.add_(row * 2) + row.mul_(3), (x.clone(), torch.randn(8)))
    assert legality.why_not(graph, graph.kernels) is not None  # every row reads the row


W8 = torch.randn(8, 8)


def test_an_activation_in_place_is_an_epilogue_of_a_product_that_nobody_else_needs():
    mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(inplace=True), torch.nn.Linear(32, 16))
    assert left_of(mlp, X)[0] == [["linear", "relu_"], ["linear"]]
    weight = torch.randn(16, 16)
    groups, reasons = left_of(lambda x, w: (lambda y: (y * 2, y.relu_()))(F.linear(x, w)), X, weight)
    assert groups == [["linear"], ["mul"], ["relu_"]]
    assert "the product linear has consumers outside of its epilogue" in reasons
    # A residual may be added to where it lies.
    (group,) = Grower(build(lambda r, x, w: r.add_(F.linear(x, w)), (X.clone(), X, weight))).groups()
    assert [k.op for k in group.outputs] == ["add_"] and group.written_bytes == 4 * X.numel()


@pytest.mark.parametrize("columns", [64, 256])
def test_a_computed_bias_fuses_whatever_its_length(columns):
    a, b, w = torch.randn(64, 64), torch.randn(columns), torch.randn(64, columns)
    assert groups_of(lambda a, b, w: torch.addmm(torch.exp(b), a, w), a, b, w) == [["exp", "addmm"]]
    assert groups_of(lambda a, b, w: F.linear(a, w.t(), torch.exp(b)), a, b, w) == [["exp", "linear"]]
    assert groups_of(lambda a, b, w: F.linear(a, w.t(), bias=torch.exp(b)), a, b, w) == [["exp", "linear"]]
    groups, reasons = left_of(lambda a, b, w: torch.addmm(torch.softmax(b, 0), a, w), a, b, w)
    assert groups == [["softmax"], ["addmm"]]
    assert reasons == ["softmax computes the bias of addmm and is not pointwise"]
