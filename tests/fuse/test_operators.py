"""Which operators fusion knows: what they are called, what work they have, and what may be fused with them."""

import operator
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from nanovllm.fuse import FusionAnalyzer, FusionCostModel, KernelGroup, legality
from nanovllm.fuse.group_module import extract, values
from nanovllm.fuse.group_timing import measure
from nanovllm.fuse.matrix_products import matmul_operands
from nanovllm.fuse.op_graph import build
from nanovllm.hardware.gpu_presets import device_model


def groups(fn, *args):
    return [g.name for g in FusionAnalyzer(fn, args).groups]


def check_groups(fn, args):
    """The groups, run one by one, give what the whole module gives."""
    analyzer = FusionAnalyzer(fn, args)
    found = values(analyzer.graph, args, {})
    for group in analyzer.groups:
        part = extract(group)
        for k, got in zip(group.outputs, part.module(*(found[n] for n in part.inputs))):
            torch.testing.assert_close(got, found[k.fx])
    rows = list(measure(analyzer, args, ways=("unfused", "compile"), backend="aot_eager", iters=2))
    assert all(r.unfused.seconds and r.compile.seconds for r in rows), rows
    wanted = fn(*args)
    (output,) = (n for n in analyzer.graph.program.graph.nodes if n.op == "output")
    torch.testing.assert_close(found[output.args[0][-1]], wanted)


@pytest.mark.parametrize(
    "name", ("and_", "or_", "xor", "lshift", "rshift", "floordiv", "mod", "iand", "ior", "ixor", "ilshift", "irshift")
)
def test_operators_of_python_are_pointwise(name):
    i = torch.randint(1, 4, (4, 8))
    fn = getattr(operator, name)
    for f, args in ((lambda a, b: fn(a * 1, b) + 1, (i, i.clone())), (lambda a: fn(a * 1, 2) + 1, (i,))):
        graph = build(f, args)
        assert [str(k.kind) for k in graph] == ["elementwise"] * 3 and len(groups(f, *args)) == 1, [k.op for k in graph]


def test_comparisons_and_other_names_are_pointwise():
    for fn in (
        lambda x: ((x > 0) & (x < 1)) | ~(x > 2) ^ (x < -1),
        lambda x: torch.where(x.absolute().subtract(1).multiply(2) > 0, x.negative(), F.hardswish(x)),
        lambda x: F.logsigmoid(x).divide(2).fix(),
    ):
        assert len(groups(fn, torch.randn(4, 8))) == 1


@pytest.mark.parametrize(
    "equation, shapes, sizes, in_order",
    [
        ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5)), (6, 5, 4), True),
        ("bij,bjk", ((2, 3, 4), (2, 4, 5)), (3, 5, 8), False),  # b occurs twice, so it is summed
        ("b i d, b j d -> b i j", ((2, 3, 4), (2, 5, 4)), (6, 5, 4), True),
        ("ij,jk->ki", ((3, 4), (4, 5)), (5, 3, 4), False),  # rows are the second operand's columns
        ("ji,jk->ik", ((4, 4), (4, 5)), (4, 5, 4), False),
        ("ij,j->i", ((3, 4), (4,)), (3, 1, 4), True),
        ("bshd,hde->bse", ((2, 3, 4, 5), (4, 5, 6)), (6, 6, 20), True),
    ],
)
def test_an_einsum_of_two_is_a_product(equation, shapes, sizes, in_order):
    args = tuple(torch.randn(*s) for s in shapes)
    fn = lambda a, b: torch.relu(torch.einsum(equation, a, b) + 1)  # noqa: E731
    product, *_ = build(fn, args)
    assert (str(product.kind), product.sizes) == ("matmul", sizes)
    rows, columns, inner = sizes
    assert product.flops == 2 * rows * columns * inner and product.written_bytes == 4 * rows * columns
    assert groups(fn, *args) == ["einsum, add, relu"]
    check_groups(fn, args)
    # What computes the left operand row by row may go in front only where its rows are those of the result.
    graph = build(lambda a, b: torch.einsum(equation, *(torch.exp(t) for t in (a, b))), args)
    product = graph.kernels[-1]
    left = graph.of[matmul_operands(product.fx)[0]]
    assert (legality.why_not(graph, [left, product]) is None) == in_order


@pytest.mark.parametrize(
    "equation, shapes, flops",
    [
        ("ii,ij->ij", ((4, 4), (4, 5)), 2 * 20),
        ("i,j->ij", ((4,), (5,)), 2 * 20),
        ("ij,jk,kl->il", ((2, 3), (3, 4), (4, 5)), 2 * 2 * 3 * 4 * 5),
        ("...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    ],
)
def test_another_einsum_is_opaque_and_has_its_flops(equation, shapes, flops):
    (k,) = build(lambda *a: torch.einsum(equation, *a), tuple(torch.randn(*s) for s in shapes))
    assert (str(k.kind), k.flops) == ("opaque", flops)


@pytest.mark.parametrize("groups_of", (1, 4))
def test_a_convolution_is_a_product(groups_of):
    x = torch.randn(2, 4, 16, 12)
    conv = nn.Conv2d(4, 8, 3, padding=1, stride=2, groups=groups_of)
    module = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()).eval().requires_grad_(False)
    product, norm, _ = build(module, (x,))
    inner = 4 // groups_of * 9
    assert (str(product.kind), product.sizes) == ("matmul", (2 * 8, 8 * 6, inner))
    assert product.flops == 2 * (2 * 8 * 8 * 6) * inner
    assert product.bytes == 4 * (x.numel() + conv.weight.numel() + 8 + 2 * 8 * 8 * 6)
    assert str(norm.kind) == "broadcast" and norm.bytes == 4 * (2 * 2 * 8 * 8 * 6 + 4 * 8)
    assert groups(module, x) == ["conv2d, batch_norm, relu"]
    check_groups(module, (x,))
    # What comes before it would be done again for every window; a residual behind it is its epilogue.
    assert groups(lambda x: module(torch.exp(x)), x) == ["exp", "conv2d, batch_norm, relu"]
    same = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
    assert groups(lambda x: torch.relu(same(x) + x), x) == ["conv2d, add, relu"]
    assert [str(k.kind) for k in build(nn.ConvTranspose2d(4, 8, 3), (x,))] == ["opaque"]


def test_other_convolutions_and_norms():
    for conv, shape, sizes in (
        (nn.Conv1d(4, 8, 3), (2, 4, 9), (16, 7, 12)),
        (nn.Conv3d(4, 8, 3), (2, 4, 5, 5, 5), (16, 27, 108)),
        (nn.Conv2d(4, 8, 1), (4, 5, 5), (8, 25, 4)),  # one image without a batch
    ):
        assert build(conv, (torch.randn(shape),)).kernels[0].sizes == sizes
    x = torch.randn(2, 4, 5, 5)
    assert [str(k.kind) for k in build(nn.BatchNorm2d(4).train(), (x,)) if k.op == "batch_norm"] == ["opaque"]


def test_a_group_norm_is_a_reduction_over_parts_of_an_image():
    x = torch.empty(2, 320, 64, 64, device="meta")
    fn = lambda x: F.silu(F.group_norm(x, 32))  # noqa: E731
    norm, _ = build(fn, (x,))
    assert str(norm.kind) == "reduction" and norm.flops == 8 * x.numel() and norm.bytes == 2 * 4 * x.numel()
    assert groups(fn, x) == ["group_norm, silu"]
    model = FusionCostModel(device_model("h100"))

    def fused(parts):
        graph = build(lambda x: F.silu(F.group_norm(x, parts)), (x,))
        return model.fused(KernelGroup(graph, graph.kernels))

    assert fused(32).passes == 1 and fused(32).seconds < fused(1).seconds  # 64 programs, not 2
    real = torch.randn(2, 8, 4, 4)
    check_groups(lambda x: F.silu(F.group_norm(x * 2, 4)), (real,))
    # A sum over all of an image needs what another group's program has computed.
    assert fused(32).flops and groups(lambda x: F.group_norm(x, 4).sum((1, 2, 3)), real)


def test_losses_are_reductions():
    x, t = torch.randn(64, 100), torch.randint(0, 100, (64,))
    cross, *_ = build(lambda x, t: F.cross_entropy(x, t), (x, t))
    assert (str(cross.kind), cross.reduced, cross.bytes) == ("reduction", (0, 1), 4 * 6400 + 8 * 64 + 4)
    take, *_ = build(lambda x, t: F.nll_loss(x, t, reduction="none"), (x, t))
    assert (str(take.kind), take.reduced, take.flops, take.bytes) == ("reduction", (1,), 64, 4 * 64 + 8 * 64 + 4 * 64)
    each = lambda x, t: F.nll_loss(F.log_softmax(x, -1), t, reduction="none") * 2  # noqa: E731
    assert groups(each, x, t) == ["log_softmax, nll_loss_nd, mul"]
    check_groups(each, (x, t))
    assert groups(lambda x, t: F.cross_entropy(x * 2, t, reduction="none"), x, t) == ["mul, cross_entropy_loss"]
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits"):
        loss = getattr(F, name)
        assert [str(k.kind) for k in build(lambda x, y: loss(x, y), (x, x + 1)) if k.op == name] == ["reduction"]  # noqa: B023
        assert str(build(lambda x, y: loss(x, y, reduction="none"), (x, x + 1)).kernels[0].kind) == "elementwise"  # noqa: B023


def test_views_in_place_cost_nothing():
    x = torch.randn(4, 8)
    for view in (
        lambda t: t.detach_(),
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(0).squeeze_(0),
    ):
        fn = lambda x: view(torch.exp(x) * 2) + 1  # noqa: B023, E731
        assert [k.op for k in build(fn, (x,))] == ["exp", "mul", "add"]
        check_groups(fn, (x,))
    assert groups(lambda x: (x * 2).detach_() + 1, x) == ["mul, add"]
    turned = lambda x: torch.softmax((x * 2).t_(), -1)  # noqa: E731
    assert groups(turned, x)
    check_groups(turned, (x,))


def test_what_the_document_calls_opaque_is():
    """Every operator in that paragraph, but for those that tests above look at."""
    text = (Path(__file__).parents[2] / "docs" / "fusion.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", text[text.index("Opaque operators are") : text.index("### Legality")]))
    x, image, i = torch.rand(4, 8), torch.rand(2, 4, 6, 6), torch.randint(0, 4, (4, 8))
    calls = {
        "dropout": lambda x, image, i: F.dropout(x),
        "rand_like": lambda x, image, i: torch.rand_like(x),
        "bernoulli": lambda x, image, i: torch.bernoulli(x),
        "multinomial": lambda x, image, i: torch.multinomial(x, 1),
        "instance_norm": lambda x, image, i: F.instance_norm(image),
        "interpolate": lambda x, image, i: F.interpolate(image, scale_factor=2),
        "pixel_shuffle": lambda x, image, i: F.pixel_shuffle(image, 2),
        "unfold": lambda x, image, i: F.unfold(image, 2),
        "mv": lambda x, image, i: torch.mv(x, x[0]),
        "dot": lambda x, image, i: torch.dot(x[0], x[1]),
        "outer": lambda x, image, i: torch.outer(x[0], x[1]),
        "tensordot": lambda x, image, i: torch.tensordot(x, x, ([1], [1])),
        "bilinear": lambda x, image, i: F.bilinear(x, x, x.new_ones(3, 8, 8)),
        "cdist": lambda x, image, i: torch.cdist(x, x),
        "sort": lambda x, image, i: torch.sort(x),
        "topk": lambda x, image, i: torch.topk(x, 2),
        "median": lambda x, image, i: torch.median(x, -1),
        "quantile": lambda x, image, i: torch.quantile(x, 0.5, -1),
        "cummax": lambda x, image, i: torch.cummax(x, -1),
        "searchsorted": lambda x, image, i: torch.searchsorted(x, x),
        "scatter": lambda x, image, i: x.scatter(0, i, x),
        "index_add": lambda x, image, i: x.index_add(0, torch.arange(4), x),
        "index_copy": lambda x, image, i: x.index_copy(0, torch.arange(4), x),
        "index_put": lambda x, image, i: x.index_put((i[:, 0],), x),
        "masked_scatter": lambda x, image, i: x.masked_scatter(x > 0, x),
        "take": lambda x, image, i: x.take(i),
        "embedding_bag": lambda x, image, i: F.embedding_bag(i, x),
        "glu": lambda x, image, i: F.glu(x),
        "prelu": lambda x, image, i: F.prelu(x, x[0]),
        "cosine_similarity": lambda x, image, i: F.cosine_similarity(x, x),
    }
    assert set(calls) == named - {"batch_norm", "einsum", "index_put_"}
    for name, call in calls.items():
        assert "opaque" in {str(k.kind) for k in build(call, (x, image, i))}, name
