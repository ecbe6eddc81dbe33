"""What writes in place, and views that turn dimensions: which kernels may still be one."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.fuse import FusionAnalyzer, legality
from nanovllm.fuse.grouping import Grower, KernelGroup
from nanovllm.fuse.op_graph import build
from tests.fuse.modules import groups_of, run_in_order

X = torch.randn(8, 16)


def left_of(fn, *args):
    """(what the groups are, why the merges that were left were)."""
    analyzer = FusionAnalyzer(fn, args, device="h200")
    return [[k.op for k in g.kernels] for g in analyzer.groups], [d.reason for d in analyzer.decisions if not d.made]


def _written_first(which):
    def fn(a, w):
        (a, w)[which].mul_(2)
        return F.linear(a, w)

    return fn


@pytest.mark.parametrize("which, rows", [(0, 8), (1, 64)])
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
    fn = lambda x: torch.softmax((x * 2).as_strided((8, 8), (8, 1)), -1)  # noqa: E731
    assert legality.rows(list(build(fn, (torch.randn(8, 8),)))) == 8


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
    assert [k.op for k in chain.kernels] == ["exp", "add_", "mul_", "sin_"]
    assert [k.op for k in chain.outputs] == ["sin_"]
    assert (chain.read_bytes, chain.written_bytes) == (plain.read_bytes, plain.written_bytes)

    graph = build(lambda x: (lambda u: (torch.flip(u, (0,)), u.add_(1)))(torch.exp(x)), (X,))
    group = KernelGroup(graph, tuple(k for k in graph if k.op != "flip"))  # two results in the same memory
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
        run_in_order(graph, Grower(graph).groups(), [x])
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
