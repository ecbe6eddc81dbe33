"""The Triton kernels of `linear_bias_act` and `gated_mlp` against float64 and against the references."""

import itertools

import pytest
import torch
from torch.nn.functional import silu

triton = pytest.importorskip("triton")
from nanovllm.kernels.extra.gated_mlp import gated_mlp as native_gated_mlp
from nanovllm.kernels.extra.linear_bias_act import ACTIVATIONS
from nanovllm.kernels.extra.linear_bias_act import linear_bias_act as native_linear_bias_act
from nanovllm.kernels.triton.gemm import tiled_products
from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan, plan_product
from nanovllm.kernels.triton.gemm.tiled_products import features, gated_mlp, linear_bias_act, matmul
from tests.kernels.triton.common import DEVICE as DEVICE_NAME
from tests.kernels.triton.common import DTYPES, GPU, graph_of, strided

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("poison")]

DEVICE = torch.device(DEVICE_NAME, 0) if GPU else torch.device("cpu")
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
TMA = not GPU or features(DEVICE)[1]
# [m, k] x [n, k]^T: one row, odd sizes, one more than a tile, no column, no sum. `test_verified.py` has more.
SHAPES = [(1, 33, 5), (1, 130, 64), (17, 96, 65), (66, 40, 70), (2, 0, 3), (2, 8, 0)]
if GPU:
    SHAPES += [(m, k, n) for m in (1, 5, 16, 33, 64, 256, 2048) for k, n in ((1024, 4096), (3072, 1024))]
    SHAPES += [(1, 4096, 12288), (130, 1000, 3001), (300, 1001, 517), (129, 2048, 151936)]
PLANS = [
    StreamPlan(1, 4, 64, 1, 4, 1), StreamPlan(1, 2, 32, 3, 4, 1), StreamPlan(1, 8, 128, 1, 4, 3),
    StreamPlan(16, 16, 32, 1, 4, 2), StreamPlan(16, 32, 16, 4, 4, 2), StreamPlan(32, 64, 64, 2, 4, 3),
    StreamPlan(64, 64, 64, 1, 4, 4), TilePlan(64, 16, 16, 2, 1, 4, 2), TilePlan(16, 32, 32, 2, 3, 4, 2),
    TilePlan(64, 64, 64, 8, 2, 4, 3), TilePlan(64, 16, 32, 3, 1, 4, 2, True),
    TilePlan(64, 32, 64, 3, 1, 4, 2, True, True), TilePlan(64, 16, 16, 3, 3, 4, 2, True),
    TilePlan(64, 256, 32, 2, 1, 8, 2, True, True),
]  # fmt: skip


def randn(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE) * scale).to(dtype)


def magnitude(x, weight):
    """What the sums of x @ weight^T would be if their terms had random signs."""
    return (x.double().square() @ weight.double().square().T).sqrt()


def within(got, expected, bound, dtype):
    assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
    bound = bound + (1e-7 if dtype == torch.float16 else 1e-30)  # the smallest numbers of float16 are coarse
    excess = ((got.double() - expected).abs() / bound).nan_to_num(nan=float("inf"))
    assert got.numel() == 0 or excess.max() <= 1, f"{excess.max().item():.3g} times the tolerance"


def check_linear(got, x, weight, bias, activation):
    """One rounding of what float32 sums give."""
    total = x.double() @ weight.double().T
    if bias is not None:
        total = total + bias.double()
    expected = ACTIVATIONS[activation](total)
    within(got, expected, RELATIVE[x.dtype] * expected.abs() + 2e-5 * (magnitude(x, weight) + 1), x.dtype)


def check_gated(got, x, gate_up, activation):
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    size = magnitude(x, gate_up).chunk(2, -1)
    activated = ACTIVATIONS[activation](gate)
    bound = 2e-5 * ((size[0] + 1e-3) * up.abs() + activated.abs() * size[1])
    within(got, activated * up, RELATIVE[x.dtype] * (activated * up).abs() + bound, x.dtype)


def every_other(x):
    """x whose rows' elements do not lie side by side."""
    wide = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def transposed(x):
    return x.T.contiguous().T


@pytest.mark.parametrize("shape, dtype", [*zip(SHAPES, itertools.cycle(DTYPES))], ids=str)
def test_linear_bias_act(shape, dtype):
    m, k, n = shape
    x, weight, bias = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    got = linear_bias_act(x, weight, bias, "gelu_tanh")
    check_linear(got, x, weight, bias, "gelu_tanh")
    assert torch.equal(got, linear_bias_act(x, weight, bias, "gelu_tanh")), "another result the second time"
    check_linear(linear_bias_act(x, weight), x, weight, None, "none")


@pytest.mark.parametrize("activation, dtype", [*zip(ACTIVATIONS, itertools.cycle(DTYPES))], ids=str)
def test_activations(activation, dtype):
    for m in (1, 70):
        x, weight, bias = randn(m, 48, dtype=dtype), randn(24, 48, dtype=dtype, seed=1), randn(24, dtype=dtype, seed=2)
        got = linear_bias_act(x, weight, bias, activation)
        check_linear(got, x, weight, bias, activation)
        native = native_linear_bias_act.native(x, weight, bias, activation)
        total = x.double() @ weight.double().T + bias.double()
        bound = RELATIVE[dtype] * 2 * (total.abs() + 1)  # the reference rounds the sum, and then the activation
        within(got, native.double(), bound, dtype)
        check_linear(linear_bias_act(x, weight, None, activation), x, weight, None, activation)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_any_strides(dtype):
    """On a GPU half of the nine layouts of each shape, by turns: each has a kernel of its own."""
    shapes = ((1, 72, 40), (5, 72, 40), (70, 72, 40)) + (((1, 2048, 20), (300, 1024, 2048)) if GPU else ())
    layouts = list(itertools.product((strided, every_other, transposed), repeat=2))
    for i, (m, k, n) in enumerate(shapes):
        x, weight, bias = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
        for xs, ws in layouts[(i + DTYPES.index(dtype)) % 2 :: 2] if GPU else layouts:
            check_linear(linear_bias_act(xs(x), ws(weight), every_other(bias), "silu"), x, weight, bias, "silu")
        # One element off: no wide load is aligned any more.
        off = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(m, k)
        check_linear(linear_bias_act(off, weight, bias), x, weight, bias, "none")
    x, weight = randn(3, 2, 24, dtype=dtype).transpose(0, 1), weight[:, :24]
    check_linear(linear_bias_act(x, weight).flatten(0, 1), x.flatten(0, 1), weight, None, "none")
    check_linear(linear_bias_act(x[0, 0], weight)[None], x[0, :1], weight, None, "none")


@pytest.mark.parametrize("plan, dtype", [*zip(PLANS, itertools.cycle(DTYPES[1:] + DTYPES[:1]))], ids=str)
def test_every_plan_on_every_shape(plan, dtype):
    """Plans that no default takes for these shapes, so that tiles are partial in every way."""
    tma = isinstance(plan, TilePlan) and plan.tma
    if tma:
        dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        if not TMA:
            assert features(DEVICE) != (True, True)
            return
    shapes = [(1, 33, 5), (1, 64, 16), (7, 96, 33), (40, 80, 48), (64, 160, 8)]
    if tma and plan.block_n == 256:
        shapes.append((64, 64, 520))
    for m, k, n in shapes:
        if (isinstance(plan, StreamPlan) and plan.tokens < m) or (tma and (n % 8 or k % 8)):
            continue
        x, weight, bias = randn(m, k, dtype=dtype), randn(2 * n, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
        for activation in ("silu", "gelu"):  # wide tiles finish erf in two pieces
            check_linear(matmul(x, weight[:n], bias, activation, False, plan), x, weight[:n], bias, activation)
        if not (tma and plan.block_n == 256):  # 512 sums a row of the tile are more than a GPU has room for
            check_gated(matmul(x, weight, None, "gelu", True, plan), x, weight, "gelu")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_silu_and_mul_of_many_tokens_rounds_as_the_ops_do(dtype):
    if not TMA:
        assert not tiled_products.many_tokens(torch.empty(64, 64, dtype=dtype, device=DEVICE))
        return
    plan, shapes = TilePlan(64, 16, 32, 2, 1, 4, 2, tma=True, flatten=True), [(70, 72, 40), (64, 64, 16), (3, 40, 8)]
    if GPU:
        plan, shapes = tiled_products.MANY_PLAN, [(4096, 1024, 3072), (4099, 2048, 6144), (5000, 576, 1536)]
    for m, k, n in shapes:
        x, weight = strided(randn(m, k, dtype=dtype)), randn(2 * n, k, dtype=dtype, seed=1, scale=k**-0.5)
        got = tiled_products.silu_and_mul_of_many(x, weight, plan)
        assert got.dtype == dtype and got.shape == (m, n) and got.is_contiguous()
        # A tensor core adds 16 columns at a time and truncates to 24 bits. No partial sum is above 6 magnitudes.
        sums, error = x.double() @ weight.double().T, -(-k // 16) * 2.0**-23 * 6 * magnitude(x, weight)
        # What is so near to a boundary of a rounding may be on either side of it.
        outcomes = torch.stack([
            (silu(gate.double()) * (1 + relative)).to(dtype).double() * up.double()
            for gate, up in itertools.product(*(((v - e).to(dtype), (v + e).to(dtype)) for v, e in zip(
                sums.chunk(2, -1), error.chunk(2, -1))))
            for relative in (-1e-5, 1e-5)
        ]).to(dtype)  # fmt: skip
        assert ((outcomes.amin(0) <= got) & (got <= outcomes.amax(0))).all()
        # Few are. Without one of the roundings more than a quarter would differ.
        gate, up = sums.to(dtype).chunk(2, -1)
        expected = (silu(gate.double()).to(dtype).double() * up.double()).to(dtype)
        assert (got != expected).double().mean() < 0.03


def test_which_numbers_of_tokens_are_many(monkeypatch):
    monkeypatch.setattr(tiled_products, "features", lambda device: (True, True))

    def weight(rows, size, dtype=torch.bfloat16):
        return type("Weight", (), {
            "shape": (rows, size), "dtype": dtype, "is_cuda": True, "device": DEVICE, "stride": lambda self, i: (size,
            1)[i],
            "element_size": lambda self: 2, "data_ptr": lambda self: 256,
        })()  # fmt: skip

    assert (
        tiled_products.many_tokens(weight(6144, 1024))
        == range(4096, 1 << 31)
        == tiled_products.many_tokens(weight(12288, 2048))
    )
    refused = [weight(6144, 1024, torch.float32), weight(24576, 4096), weight(3072, 1020), weight(8, 0)]
    assert not any(tiled_products.many_tokens(w) for w in refused)
    monkeypatch.setattr(tiled_products, "features", lambda device: (True, False))
    assert not tiled_products.many_tokens(weight(6144, 1024))


@pytest.mark.parametrize("activation, dtype", [*zip(("silu", "gelu", "gelu_tanh"), DTYPES)], ids=str)
def test_gated_mlp(activation, dtype):
    shapes = [(1, 1, 1), (1, 33, 20), (17, 40, 72), (66, 32, 40), (2, 8, 0)]
    if GPU:
        shapes += [(m, 1024, 3072) for m in (1, 3, 16, 64, 256, 2048)] + [(1, 4096, 12288), (130, 1000, 3001)]
    for m, hidden, intermediate in shapes:
        x = randn(m, hidden, dtype=dtype)
        gate_up = randn(2 * intermediate, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
        down = randn(hidden, intermediate, dtype=dtype, seed=2, scale=max(1, intermediate) ** -0.5)
        got = gated_mlp(x, gate_up, down, activation)
        gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
        between = ACTIVATIONS[activation](gate) * up
        expected = between @ down.double().T
        bound = RELATIVE[dtype] * (expected.abs() + magnitude(between, down) + 1e-30)
        within(got, expected, bound, dtype)
        assert torch.equal(got, gated_mlp(x, gate_up, down, activation)), "another result the second time"
        assert torch.equal(got, gated_mlp(x[None], gate_up, down, activation)[0])
        within(native_gated_mlp.native(x, gate_up, down, activation), expected, 2 * bound, dtype)
        wide = native_gated_mlp.native(x.double(), gate_up.double(), down.double(), activation)
        torch.testing.assert_close(wide, expected)
        if m in (1, 17):
            within(gated_mlp(strided(x), transposed(gate_up), transposed(down), activation), expected, bound, dtype)


def test_large_values_do_not_overflow_before_the_rounding():
    x, weight = torch.full((2, 64), 200.0, device=DEVICE), torch.full((8, 64), -200.0, device=DEVICE)
    for dtype in DTYPES:
        got = linear_bias_act(x.to(dtype), weight.to(dtype), None, "silu")
        assert torch.equal(got, torch.zeros_like(got))  # the sum, -2.6e6, is beyond float16
        assert linear_bias_act(x.to(dtype), -weight.to(dtype), None, "relu").isinf().all() == (dtype == torch.float16)


def test_plans_cover_any_shape():
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        m, n, k = (int(2 ** (torch.rand(1, generator=g) * top)) for top in (14, 18, 15))
        for itemsize in (2, 4):
            for gated in (False, True):
                plan = plan_product(m, n, k, itemsize, gated, True, itemsize == 2, 132)
                assert plan.splits * plan.block_k <= max(k, 1) * 2 or plan.splits == 1
                if isinstance(plan, StreamPlan):
                    assert plan.tokens >= m and plan.rows >= 2


def test_a_wrong_activation_is_named():
    x, w = randn(5, 8, dtype=torch.float32), randn(6, 8, dtype=torch.float32)
    for call in (lambda: linear_bias_act(x, w, None, "swish"), lambda: gated_mlp(x, w, w[:3].T, "relu")):
        with pytest.raises(ValueError, match="^activation: "):
            call()


@pytest.mark.gpu
def test_in_a_graph_with_new_data():
    for m in (1, 8, 64, 200):
        x = randn(m, 1024, dtype=torch.bfloat16)
        gate_up, down = (randn(*shape, dtype=x.dtype, scale=0.03) for shape in ((6144, 1024), (1024, 3072)))
        bias = randn(1024, dtype=x.dtype)

        def run(x=x, gate_up=gate_up, down=down, bias=bias):
            return linear_bias_act(gated_mlp(x, gate_up, down), down[:, :1024], bias, "gelu")

        graph, y = graph_of(run)
        for seed in range(1, 4):
            x.copy_(randn(m, 1024, dtype=torch.bfloat16, seed=seed))
            down.copy_(randn(1024, 3072, dtype=torch.bfloat16, seed=seed, scale=0.03))
            graph.replay()
            got = y.clone()
            assert torch.equal(got, run()) and got.isfinite().all()


@pytest.mark.gpu
def test_a_weight_written_just_before_is_read_new():
    """Kernels that start before the one before them ends must not read what that one writes."""
    x = randn(1, 3072, dtype=torch.bfloat16)
    for m in (1, 16):
        h, gate_up = randn(m, 1024, dtype=torch.bfloat16), randn(6144, 1024, dtype=torch.bfloat16, seed=2, scale=0.03)
        down = torch.zeros(1024, 3072, dtype=torch.bfloat16, device=DEVICE)
        for seed in range(20):
            new = randn(1024, 3072, dtype=torch.bfloat16, seed=seed)
            expected = linear_bias_act(x, new), gated_mlp(h, gate_up, new)
            torch.cuda.synchronize()
            down.copy_(new)
            first = linear_bias_act(x, down)
            down.zero_()
            down.copy_(new)
            second = gated_mlp(h, gate_up, down)
            assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


@pytest.mark.gpu
def test_float32_is_not_tf32_unless_pytorch_is_told():
    x, weight = randn(100, 512, dtype=torch.float32), randn(96, 512, dtype=torch.float32, seed=1)
    exact = linear_bias_act(x, weight)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        fast = linear_bias_act(x, weight)
    finally:
        torch.set_float32_matmul_precision(before)
    check_linear(exact, x, weight, None, "none")
    error = ((fast.double() - exact.double()) / magnitude(x, weight)).abs().max()
    assert 1e-5 < error < 1e-2
