"""Products of few tokens on Hopper: against float64 there; elsewhere the plans, and which products are taken."""

import itertools
from bisect import bisect_left
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)

from nanovllm.kernels.ops.linear import linear_add_rms_norm, linear_silu_and_mul
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm import hopper_product, small_products
from nanovllm.kernels.triton.gemm.hopper_product import HopperProductPlan, plan_hopper_product
from nanovllm.tune.launches import recorded
from tests.kernels.triton.common import graph_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def on_hopper(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")(test))


DTYPES = [torch.bfloat16, torch.float16]
RELATIVE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# QKV, output, gate-up and down projections (rows of the weight, columns) of Qwen3-0.6B, 8B and SmolLM2-135M, and odd
# ones: rows that end inside a program's 64, one tile of columns, columns that no number of slots divides.
SHAPES = [
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (24576, 4096), (4096, 12288), (960, 576),
    (576, 1536),
    (16, 64), (80, 64), (208, 1088), (48, 4416), (1040, 320),
]  # fmt: skip
TILES = (8, 16, 32, 64, 96, 128, 160, 192, 256)
TOKENS = (1, 3, 8, 9, 16, 31, 32, 33, 64, 80, 100, 129, 160, 176, 208, 256)


def make(tokens, rows, size, dtype, seed, scale=1.0, stride=None):
    """x, a view of rows `stride` apart with NaN in the gaps, a weight, a bias, and their product without bias."""
    g = torch.Generator("cuda").manual_seed(seed)
    wide = torch.full((tokens, stride or size), float("nan"), dtype=dtype, device="cuda")
    wide[:, :size] = torch.randn(tokens, size, generator=g, device="cuda") * scale
    x, weight = wide[:, :size], (torch.randn(rows, size, generator=g, device="cuda") * size**-0.5).to(dtype)
    bias = torch.randn(rows, generator=g, device="cuda").to(dtype)
    return x, weight, bias, F.linear(x.double(), weight.double())


def near(got, expected, factor=1.0):
    """Within factor * the tolerance of the dtype * the largest result. float32 sums of parts come as they are."""
    if got.dtype == torch.float32:
        got = got.double().sum(0)
        tolerance = max(1e-4, 2e-5 * expected.abs().amax().item())
    else:
        tolerance = factor * RELATIVE[got.dtype] * max(1.0, expected.abs().amax().item())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


def gated(exact):
    gate, up = exact.chunk(2, -1)
    return F.silu(gate) * up


WAYS = ("plain", "biased", "gated", "split")


def checked(x, weight, bias, exact, way, plan=None):
    """One way of a product. exact: x W^T in float64."""
    if way == "biased":
        near(hopper_product.product(x, weight, bias, plan=plan), exact + bias.double())
    elif way == "gated":
        near(hopper_product.product(x, weight, gated=True, plan=plan), gated(exact), 2)
    else:
        near(hopper_product.product(x, weight, split=way == "split", plan=plan), exact)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", SHAPES, ids=str)
def test_products(rows, size, dtype, poison):
    """One of four ways of each product, each a kernel to compile, by turns of the tiles, dtypes and shapes."""
    shift = SHAPES.index((rows, size)) + 2 * DTYPES.index(dtype)
    for tokens in TOKENS:
        x, weight, bias, exact = make(tokens, rows, size, dtype, tokens, stride=size + 8 * (tokens % 3))
        assert hopper_product.takes(x, weight) == (tokens in hopper_product.num_tokens_taken(weight))
        checked(x, weight, bias, exact, WAYS[(bisect_left(TILES, tokens) + shift) % 4])


ONE_TILE = [
    (1, 4, 2, 3), (1, 1, 2, 9), (1, 2, 3, 3), (2, 2, 2, 3), (5, 4, 1, 1), (3, 1, 6, 1), (17, 1, 1, 1), (1, 2, 4, 3),
]  # fmt: skip
TWO_TILES = [(1, 1, 3, 6), (1, 1, 3, 6, 256), (1, 2, 2, 5, 256), (5, 2, 2, 1, 256), (9, 1, 2, 1, 256)]
MANY_NUMBERS = (1, 7, 33, 65, 70, 96, 97, 130, 144, 160, 161, 192, 193, 250, 256)
PLANS = [
    *((plan, (2, 17, 40), (208,)) for plan in ONE_TILE),
    *((plan, MANY_NUMBERS, (80, 272)) for plan in TWO_TILES),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("plan, numbers, rows", PLANS, ids=str)
def test_any_plan(plan, numbers, rows, poison):
    """Slots used once and many times, a last group that is partly there, more programs than columns need; two tiles of
    tokens, of one program or of two, the second inside the first or not. Where a program has all columns, the ways of
    the product take turns.
    """
    first, plan = [p for p, *_ in PLANS].index(plan), HopperProductPlan(*plan)
    assert plan.splits * plan.chunks * plan.slots * plan.rounds >= 17
    for (i, tokens, num_rows), seed in itertools.product(
        zip(itertools.count(first), numbers, itertools.cycle(rows)), range(3 if len(rows) == 1 else 1)
    ):
        x, weight, bias, exact = make(tokens, num_rows, 17 * 64, torch.bfloat16, tokens + seed, stride=17 * 64 + 8)
        checked(x, weight, bias, exact, WAYS[1 + i % 3] if plan.splits == 1 else "split", plan)


def distance(got, expected):
    return (got.double() - expected.double()).norm() / expected.double().norm()


@on_hopper
@pytest.mark.parametrize("scale", [1e-3, 50.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_ops_round_as_the_ops_they_fuse(dtype, scale, poison):
    most = {torch.bfloat16: (4e-3, 6e-3), torch.float16: (5e-4, 1e-3)}[dtype]
    for tokens, (rows, size) in itertools.product((2, 8, 32, 64), ((1024, 3072), (576, 1536), (4096, 4096))):
        x, weight, *_ = make(tokens, rows, size, dtype, tokens, scale)
        residual = torch.randn(tokens, 2 * rows, device="cuda").to(dtype)[:, ::2] * scale
        norm, bias = torch.rand(rows, device="cuda").to(dtype) + 0.5, torch.randn(rows, device="cuda").to(dtype)
        for b in (None, bias):
            got, total = small_products.linear_add_rms_norm(x, weight, residual, norm, 1e-6, b)
            want, want_total = linear_add_rms_norm.native(x, weight, residual, norm, 1e-6, b)
            assert distance(got, want) < most[0] and distance(total, want_total) < most[0]
        got, want = small_products.linear_silu_and_mul(x, weight), linear_silu_and_mul.native(x, weight)
        assert distance(got, want) < most[1]


@on_hopper
def test_tokens_do_not_see_each_other():
    """A token's bits do not depend on the others, whose numbers may be infinite or not numbers; and no run differs
    from another."""
    x, weight, *_ = make(32, 4096, 1024, torch.bfloat16, 0)
    first = hopper_product.product(x, weight)
    x = x.clone()
    x[5], x[31] = float("nan"), float("inf")
    for _ in range(20):
        again = hopper_product.product(x, weight)
        kept = [i for i in range(32) if i not in (5, 31)]
        assert torch.equal(again[kept], first[kept]) and again[5].isnan().all()


@on_hopper
def test_a_chain_replays_with_new_tokens():
    """Kernels that start before their predecessors have ended read what those wrote, in a graph too, ten thousand
    times."""
    tokens, hidden, inner = 32, 1024, 3072
    _, gate_up, *_ = make(tokens, 2 * inner, hidden, torch.bfloat16, 1)
    _, down, *_ = make(tokens, hidden, inner, torch.bfloat16, 2)
    norm = torch.rand(hidden, device="cuda").bfloat16() + 0.5
    x, residual = torch.randn(2, tokens, hidden, device="cuda").bfloat16()

    def chain():
        y, r = x, residual
        for _ in range(4):
            y, r = small_products.linear_add_rms_norm(
                small_products.linear_silu_and_mul(y, gate_up), down, r, norm, 1e-6
            )
        return y

    graph, out = graph_of(chain)
    for seed in range(3):
        x.copy_(torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected, r = x, residual
        for _ in range(4):
            expected, r = linear_add_rms_norm.native(linear_silu_and_mul.native(expected, gate_up), down, r, norm, 1e-6)
        assert distance(out, expected) < 1e-2
        first = out.clone()
        for _ in range(3333):
            graph.replay()
        assert torch.equal(out, first)


def fits(plan, tokens):
    """Whether a program's tiles fit into a multiprocessor's shared memory."""
    return plan.chunks * plan.slots * (64 + tunables.hopper_product_tokens(tokens, plan.block)) * 128 <= 227 << 10


def test_plans_cover_every_column_and_fit():
    large = [(51200, 5120), (57344, 8192), (65536, 4096)]
    for (rows, size), tokens, split, sms in itertools.product(SHAPES + large, TOKENS, (False, True), (78, 114, 132)):
        plan = plan_hopper_product(tokens, rows, size, split, sms)
        assert plan.splits == 1 or split
        columns = plan.chunks * plan.slots * plan.rounds
        assert plan.splits * columns * 64 >= size, "columns left out"
        assert (plan.splits - 1) * columns * 64 < size, "a program without columns"
        assert fits(plan, tokens)
        assert plan.slots > 1 or plan.rounds == 1, "a slot that is refilled needs another beside it"
    for plan, numbers, _ in PLANS:
        assert all(fits(HopperProductPlan(*plan), tokens) for tokens in numbers), plan


def weight_like(rows, size, dtype=torch.bfloat16, contiguous=True, address=0):
    return SimpleNamespace(
        shape=(rows, size), dtype=dtype, is_cuda=True, device=SimpleNamespace(index=0),
        is_contiguous=lambda: contiguous, data_ptr=lambda: address,
    )  # fmt: skip


def test_what_is_taken(monkeypatch):
    monkeypatch.setattr(hopper_product, "is_hopper", lambda index: True)
    taken = hopper_product.num_tokens_taken
    assert taken(weight_like(4096, 1024)) == range(1, 257) == taken(weight_like(4096, 1024, torch.float16))
    assert taken(weight_like(24576, 4096), gated=True) == range(1, 129)
    assert taken(weight_like(2048, 6144)) == range(2, 193)
    # 192 programs on 132 multiprocessors; 256 are even again.
    assert taken(weight_like(12288, 4096), gated=True) == taken(weight_like(12288, 4096)) == range(1, 65)
    assert taken(weight_like(16384, 4096), gated=True) == range(1, 129)
    # More programs than the GPU has room for at once: gate and up of Llama 3 8B, and a rank's of Qwen3-32B on two.
    for weight in (weight_like(28672, 4096), weight_like(25600, 5120)):
        assert taken(weight, gated=True) == taken(weight) == range(1, 33)
        assert small_products.num_tokens_linear(weight) == range(1, 33)
        assert [n for n in (32, 33) if n in small_products.num_tokens_linear_silu_and_mul(weight)] == [32]
    refused = [
        weight_like(4096, 1024, torch.float32), weight_like(4096, 1000), weight_like(4096, 0), weight_like(0, 64),
        weight_like(4096, 1024, contiguous=False), weight_like(4096, 1024, address=8),
    ]  # fmt: skip
    assert not any(taken(w) for w in refused)
    assert taken(weight_like(4104, 1024)) and not taken(weight_like(4104, 1024), gated=True)
    assert small_products.num_tokens_linear_add_rms_norm(weight_like(4096, 1024)) == range(1, 257)
    assert small_products.num_tokens_linear(weight_like(4096, 1024)) == range(1, 257)
    assert not small_products.num_tokens_add_rms_norm_linear(weight_like(4096, 1024))
    # A gated product has another kernel for many tokens, and none in between.
    monkeypatch.setattr(small_products, "many_tokens", lambda weight: range(4096, 1 << 31))
    taken_gated = small_products.num_tokens_linear_silu_and_mul(weight_like(6144, 1024))
    assert [n for n in (0, 1, 256, 257, 4095, 4096, 16384) if n in taken_gated] == [1, 256, 4096, 16384]
    # The language-model head: one token has a kernel of its own, many are the library's.
    assert taken(weight_like(151936, 1024)) == range(2, 33) and not taken(weight_like(151936, 1024), gated=True)
    assert small_products.num_tokens_linear(weight_like(151936, 1024)) == range(1, 33)
    # A router has few rows: too few programs here, and many in the kernels of few tokens. Projections have more rows.
    for rows in (8, 128, 256):
        assert not taken(weight_like(rows, 2048)) and not taken(weight_like(rows, 2048), gated=True)
        assert small_products.num_tokens_linear(weight_like(rows, 2048)) == range(1, 9)
    assert taken(weight_like(320, 2048)) == range(1, 257)
    # One token of a layer of this size is better in the kernels that have the norm before the product.
    assert small_products.num_tokens_linear(weight_like(4096, 2048)) == range(1, 65)
    assert small_products.num_tokens_add_rms_norm_linear(weight_like(4096, 2048)) == range(1, 2)
    monkeypatch.setattr(hopper_product, "is_hopper", lambda index: False)
    assert not small_products.num_tokens_linear_add_rms_norm(weight_like(4096, 1024))
    assert small_products.num_tokens_add_rms_norm_linear(weight_like(4096, 1024)) == range(1, 9)


@pytest.mark.parametrize(
    "rows, size",
    [(1024, 2048), (1024, 3072), (2048, 6144), (4096, 1024), (4096, 2048), (40000, 1024), (64, 96), (128, 2048)],
)
def test_a_plain_call_does_what_layers_do(rows, size, monkeypatch):
    """On a Hopper GPU that is not there: which product runs, by the op itself and by what `num_tokens` tells layers."""
    monkeypatch.setattr(
        hopper_product, "num_tokens_taken", lambda w, gated=False: hopper_product.worth(*w.shape, gated, w.dtype)
    )
    weight = torch.empty(rows, size, dtype=torch.bfloat16, device="meta")

    def product(call, *args):
        with recorded() as launches:
            call(*args)
        ran = {launch.kernel.__name__: launch.arguments.get("GATED") for launch in launches}
        if "hopper_product_kernel" in ran:
            return "hopper gated" if ran["hopper_product_kernel"] else "hopper"
        return "few" if ran.keys() & {"vector_kernel", "matrix_kernel"} else "library"

    for tokens in (1, 2, 8, 9, 16, 32, 33, 64, 65, 256, 257):
        x, out = (torch.empty(tokens, n, dtype=torch.bfloat16, device="meta") for n in (size, rows))
        plain = product(small_products.linear, x, weight)
        assert (plain == "library") == (tokens not in small_products.num_tokens_linear(weight))
        added = product(small_products.linear_add_rms_norm, x, weight, out, out[0], 1e-6)
        assert added == ("hopper" if tokens in small_products.num_tokens_linear_add_rms_norm(weight) else plain)
        gated = product(small_products.linear_silu_and_mul, x, weight)
        assert gated == ("hopper gated" if tokens in small_products.num_tokens_linear_silu_and_mul(weight) else plain)


def test_few_programs_with_all_columns_take_fewer_tokens(monkeypatch):
    assert hopper_product.most_tokens_whole(1024, 3072) == 32 and hopper_product.most_tokens_whole(1024, 2048) == 64
    assert hopper_product.most_tokens_whole(2048, 6144) == 8  # never fewer: measured
    assert hopper_product.most_tokens_whole(1024, 1024) == 256 == hopper_product.most_tokens_whole(4096, 1024)
    assert hopper_product.most_tokens_whole(4096, 12288) == 32 == hopper_product.most_tokens_whole(5120, 5120)
    assert hopper_product.most_tokens_whole(4096, 2048) == 64 and hopper_product.most_tokens_whole(6144, 4096) == 128
    monkeypatch.setattr(hopper_product, "is_hopper", lambda index: True)
    assert small_products.num_tokens_linear(weight_like(1024, 3072)) == range(1, 33)
    assert small_products.num_tokens_linear(weight_like(2048, 6144)) == range(1, 9)
    assert small_products.num_tokens_linear_add_rms_norm(weight_like(1024, 3072)) == range(1, 257)


def test_weights_are_read_early_only_if_they_are_parameters():
    """Any other tensor may be what the kernel before is about to write: then the launch waits for that, as usual."""
    x, parts = torch.randn(2, 1024, dtype=torch.bfloat16), torch.zeros(2, 2, 1024)
    matrix = torch.randn(2048, 1024, dtype=torch.bfloat16)
    weight, norm, bias, column = (
        torch.nn.Parameter(w, requires_grad=False) for w in (matrix, matrix[0], matrix[:, 0], matrix[:1024, 0])
    )
    for of_product, of_norm, early in (
        ((weight, None), norm, True),
        ((matrix, None), matrix[0], False),
        ((weight, bias), column, False),  # strided: the kernel before has just written a copy
    ):
        with recorded() as launches:
            hopper_product.product(x, *of_product)
            small_products.sum_add_rms_norm(parts, None, x, of_norm, 1e-6)
        assert [launch.options["launch_pdl"] for launch in launches] == [early] * 2
