"""The kernels of a mixture of experts: against float64, with skewed routing, and the same bits every time."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.ops import moe_experts as experts_op
from nanovllm.kernels.ops import moe_experts_fp8 as fp8_op
from nanovllm.kernels.ops import moe_route as route_op
from nanovllm.kernels.triton.moe.expert_plan import plan_pairs
from nanovllm.kernels.triton.moe.experts import moe_experts, moe_experts_fp8
from nanovllm.kernels.triton.moe.route import moe_route
from nanovllm.kernels.triton.moe.sort import max_blocks, sort_pairs
from tests.kernels.triton.common import DEVICE, DTYPES, GPU, graph_of, randn, strided

pytestmark = pytest.mark.triton
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def chosen(routing, tokens, num_experts, top_k, seed=0):
    """Experts of each token, int32 [tokens, top_k]."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator)
    if routing == "skewed":
        scores[:, 1] += 10  # in every token
        scores[:, num_experts // 2 :] -= 10  # in none, if the others suffice
    return scores.topk(top_k, -1).indices.int().to(DEVICE)


def fp8_matrices(num_experts, rows, columns, seed):
    """A weight of 8-bit floats and its scales."""
    weight = randn(num_experts, rows, columns, dtype=torch.float32, seed=seed, scale=100.0).clamp_(-448, 448)
    weight[0, 0, :3] = torch.tensor([0.0, 2.0**-9, -(2.0**-6)])  # zero, and subnormal numbers
    blocks = num_experts, -(-rows // 128), -(-columns // 128)
    scale = randn(*blocks, dtype=torch.float32, seed=seed + 9).exp() * columns**-0.5 / 100
    scale[-1] = 0.0  # an expert of nothing
    return weight.to(torch.float8_e4m3fn), scale


def strided_weights(planes):
    """With 8-bit floats, whose rows are read wide, as they are."""
    return [strided(planes[0]), planes[1]] if len(planes) == 2 else planes


def check(tokens, num_experts, top_k, intermediate, hidden, dtype, routing="uniform", seed=0, fp8=False):
    """-> (the op, x, its weights and scales, shares, experts, the result), against float64."""
    x = randn(tokens, hidden, dtype=dtype, seed=seed)
    shapes = (2 * intermediate, hidden), (hidden, intermediate)
    if fp8:
        planes = [plane for i, shape in enumerate(shapes) for plane in fp8_matrices(num_experts, *shape, i + 1)]
    else:
        planes = [
            randn(num_experts, *shape, dtype=dtype, seed=seed + i + 1, scale=shape[1] ** -0.5)
            for i, shape in enumerate(shapes)
        ]
    run, declared = (moe_experts_fp8, fp8_op) if fp8 else (moe_experts, experts_op)
    weights = randn(tokens, top_k, dtype=torch.float32, seed=seed + 3).softmax(-1)
    experts = chosen(routing, tokens, num_experts, top_k, seed)
    got = run(x, *planes, weights, experts)
    assert got.dtype == dtype
    if GPU:
        assert torch.equal(got, run(x, *planes, weights, experts)), "other bits in another call"
    wide = [t if t.dtype == torch.float8_e4m3fn else t.double() for t in planes]
    want = declared.native(x.double(), *wide, weights.double(), experts)
    assert want.abs().max() > 0.1
    # Strides decide how wide loads are, and so which thread adds what: other strides may give other bits.
    for result in (got, run(strided(x), *strided_weights(planes), weights, experts)):
        atol = TOLERANCE[dtype] * (want.abs().max() if fp8 else 1)
        torch.testing.assert_close(result.double(), want, rtol=TOLERANCE[dtype], atol=atol)
    return run, x, planes, weights, experts, got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_tokens(dtype, poison):
    assert plan_pairs(1, 3, 5, 40, 72, dtype.itemsize) and plan_pairs(2, 2, 32, 40, 72, dtype.itemsize)
    check(1, 5, 3, 40, 72, dtype)
    if dtype != torch.float16:
        check(2, 32, 2, 17, 33, dtype, "skewed", seed=5)
    if GPU:
        check(4, 256, 8, 768, 2048, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks(dtype, poison):
    routing = "uniform" if dtype == torch.float16 else "skewed"
    check(19, 6, 3, 40, 72, dtype, routing)
    if GPU:
        check(1000, 128, 8, 768, 2048, dtype, routing)


@pytest.mark.parametrize("dtype, routing", [(torch.bfloat16, "uniform"), (torch.float16, "skewed")], ids=str)
def test_experts_in_8_bit_floats(dtype, routing, poison):
    """Against the dequantised weights: a pair at a time, and in blocks."""
    check(1, 3, 2, 128, 160, dtype, fp8=True)
    check(7, 4, 2, 128, 96, dtype, routing, fp8=True)
    if GPU:
        check(1, 128, 8, 768, 2048, dtype, fp8=True)
        check(1000, 128, 8, 768, 2048, dtype, routing, fp8=True)


def test_a_token_has_the_same_bits_wherever_it_stands(poison):
    """Its sum is in the order of its own choices, whatever the tokens beside it and in whatever order they are."""
    run, x, planes, weights, experts, got = check(21, 7, 2, 24, 48, torch.float32)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(run(x[order], *planes, weights[order], experts[order]), got[order])


@pytest.mark.parametrize("fp8", [False, True])
def test_experts_that_do_not_exist_are_not_read(fp8, poison):
    """Ids are checked on request alone on a GPU: wrong ones must not lead to wild reads, nor spoil other tokens."""
    shape = (6, 4, 2, 128, 64, torch.float16) if fp8 else (21, 7, 2, 24, 48, torch.float32)
    run, x, planes, weights, experts, got = check(*shape, fp8=fp8)
    wrong = experts.clone()
    wrong[4] = torch.tensor([shape[1], -3])
    others = torch.arange(len(x)) != 4
    assert torch.equal(run(x, *planes, weights, wrong)[others], got[others])
    one = run(x[4:5], *planes, weights[4:5], wrong[4:5])
    assert torch.equal(one, torch.zeros_like(one))


@pytest.mark.parametrize("hidden, dtype", [(64, torch.float32), (40, torch.float16)])
def test_what_is_left_to_the_reference(hidden, dtype):
    planes = *fp8_matrices(2, 256, hidden, 1), *fp8_matrices(2, hidden, 128, 2)
    weights, experts = torch.ones(3, 1, device=DEVICE), torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    arguments = randn(3, hidden, dtype=dtype), *planes, weights, experts
    assert torch.equal(moe_experts_fp8(*arguments), fp8_op.native(*arguments))


@pytest.mark.parametrize("which", [1, 3])
def test_scales_of_another_shape(which):
    planes = [*fp8_matrices(2, 256, 64, 1), *fp8_matrices(2, 64, 128, 2)]
    planes[which] = planes[which][:, :, :0]
    x, weights, experts = randn(1, 64, dtype=torch.float16), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    name = "gate_up_scale" if which == 1 else "down_scale"
    for call in (moe_experts_fp8, fp8_op.native):
        with pytest.raises(ValueError, match=rf"{name}: expected \[2, .*\] for .*, not \[2, "):
            call(x, *planes, weights.to(DEVICE), experts.to(DEVICE))


@pytest.mark.parametrize(
    "tokens, top_k, num_experts, rows, routing",
    [
        (1, 1, 1, 16, "uniform"), (5, 3, 4, 16, "uniform"), (64, 2, 60, 16, "uniform"), (65, 2, 4, 32, "skewed"),
        (300, 1, 130, 64, "uniform"), (450, 20, 40, 128, "skewed"),
    ],
)  # fmt: skip
def test_pairs_are_sorted_and_every_block_has_one_expert(tokens, top_k, num_experts, rows, routing, poison):
    experts = chosen(routing, tokens, num_experts, top_k)
    order, blocks = sort_pairs(experts, num_experts, rows)
    flat = experts.flatten().cpu()
    assert torch.equal(order.cpu().long(), flat.sort(stable=True).indices)
    assert blocks.shape == (3, max_blocks(tokens * top_k, num_experts, rows))
    covered = []
    for expert, first, end in blocks.T.tolist():
        if expert < 0:
            continue
        places = range(first, min(first + rows, end))
        assert len(places) > 0 and all(flat[order[place]] == expert for place in places)
        covered += places
    assert covered == list(range(tokens * top_k))
    used = int((blocks[0] >= 0).sum())
    assert (blocks[0, :used] >= 0).all()


def test_the_bound_on_blocks_is_reached():
    # 3 experts, blocks of 4: 1 + 1 + 9 pairs fill 5 blocks.
    experts = torch.tensor([0, 1] + [2] * 9, dtype=torch.int32, device=DEVICE)[:, None]
    assert max_blocks(11, 3, 4) == 5 and (sort_pairs(experts, 3, 4).blocks[0] >= 0).all()


def test_routing(poison):
    shapes = (3, 1, 1), (9, 60, 8), (4, 129, 5), (5, 8, 8)
    for seed, (tokens, num_experts, top_k) in enumerate(shapes):
        dtype = DTYPES[seed % 3]
        logits = randn(tokens, num_experts, dtype=dtype, seed=seed).round(decimals=1)  # with ties
        logits[0, 0] = -0.0
        for renormalise in (True, False):
            got = moe_route(strided(logits), top_k, renormalise)
            arguments = dict(logits=logits, top_k=top_k, renormalise=renormalise)
            assert route_op.compare(got, arguments, dtype) is None


def test_routing_of_logits_that_are_not_finite(poison):
    bad, inf = torch.nan, torch.inf
    logits = torch.tensor([[bad] * 4, [-inf] * 4, [inf] * 4, [inf, -inf, bad, 0], [3e38, -3e38, 3e38, 0]])
    for renormalise in (True, False):
        got = moe_route(logits.to(DEVICE), 2, renormalise)
        arguments = dict(logits=logits.to(DEVICE), top_k=2, renormalise=renormalise)
        assert got[0].isfinite().all() and route_op.compare(got, arguments, torch.float32) is None


def test_no_token(poison):
    weights, experts = moe_route(randn(0, 8, dtype=torch.float32), 2, True)
    x = randn(0, 48, dtype=torch.float32)
    gate_up, down = randn(8, 32, 48, dtype=torch.float32), randn(8, 48, 16, dtype=torch.float32)
    assert moe_experts(x, gate_up, down, weights, experts).shape == (0, 48)


@pytest.mark.gpu
def test_a_captured_graph_routes_other_tokens():
    """One graph serves any routing: no count is read on the host."""
    dtype = torch.bfloat16
    gate_up, down = randn(32, 2 * 64, 256, dtype=dtype, scale=0.06), randn(32, 256, 64, dtype=dtype, scale=0.12)
    for tokens in (1, 2, 40, 700):
        x, logits = randn(tokens, 256, dtype=dtype), randn(tokens, 32, dtype=dtype, seed=1)

        def step(x=x, logits=logits):
            return moe_experts(x, gate_up, down, *moe_route(logits, 4, True))

        graph, captured = graph_of(step)
        for seed in range(2, 5):
            logits.copy_(randn(tokens, 32, dtype=dtype, seed=seed))
            if seed == 4:
                logits[:, :4] += 100  # all tokens go to four experts
            graph.replay()
            assert torch.equal(captured, step())
