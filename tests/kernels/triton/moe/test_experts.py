"""The kernels of a mixture of experts: against float64, with skewed routing, and the same bits every time."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.ops import moe_experts as experts_op
from nanovllm.kernels.ops import moe_route as route_op
from nanovllm.kernels.triton.moe.experts import moe_experts
from nanovllm.kernels.triton.moe.plan import plan_pairs
from nanovllm.kernels.triton.moe.route import moe_route
from nanovllm.kernels.triton.moe.sort import max_blocks, sort_pairs
from tests.kernels.triton.common import DEVICE, DTYPES, GPU, randn, strided

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


def check(tokens, num_experts, top_k, intermediate, hidden, dtype, routing="uniform", seed=0):
    x = randn(tokens, hidden, dtype=dtype, seed=seed)
    gate_up = randn(num_experts, 2 * intermediate, hidden, dtype=dtype, seed=seed + 1, scale=hidden**-0.5)
    down = randn(num_experts, hidden, intermediate, dtype=dtype, seed=seed + 2, scale=intermediate**-0.5)
    weights = randn(tokens, top_k, dtype=torch.float32, seed=seed + 3).softmax(-1)
    experts = chosen(routing, tokens, num_experts, top_k, seed)
    got, again = (moe_experts(x, gate_up, down, weights, experts) for _ in range(2))
    assert got.dtype == dtype
    assert torch.equal(got, again), "other bits in another call"
    wide = [t.double() for t in (x, gate_up, down, weights)]
    want = experts_op.native(*wide, experts)
    # Strides decide how wide loads are, and so which thread adds what: other strides may give other bits.
    for result in (got, moe_experts(strided(x), strided(gate_up), down, weights, experts)):
        torch.testing.assert_close(result.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    return x, gate_up, down, weights, experts, got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_tokens(dtype, poison):
    assert plan_pairs(1, 3, 5, 40, 72, dtype.itemsize) and plan_pairs(2, 2, 32, 40, 72, dtype.itemsize)
    check(1, 5, 3, 40, 72, dtype)
    check(2, 32, 2, 17, 33, dtype, "skewed", seed=5)
    if GPU:
        check(4, 256, 8, 768, 2048, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_blocks(dtype, routing, poison):
    check(19, 6, 3, 40, 72, dtype, routing)
    if GPU:
        check(1000, 128, 8, 768, 2048, dtype, routing)


def test_a_token_has_the_same_bits_wherever_it_stands(poison):
    """Its sum is in the order of its own choices, whatever the tokens beside it and in whatever order they are."""
    x, gate_up, down, weights, experts, got = check(21, 7, 2, 24, 48, torch.float32)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = moe_experts(x[order], gate_up, down, weights[order], experts[order])
    assert torch.equal(moved, got[order])


def test_experts_that_do_not_exist_are_not_read(poison):
    """Ids are checked on request alone on a GPU: wrong ones must not lead to wild reads, nor spoil other tokens."""
    x, gate_up, down, weights, experts, got = check(21, 7, 2, 24, 48, torch.float32)
    wrong = experts.clone()
    wrong[4] = torch.tensor([7, -3])
    spoilt = moe_experts(x, gate_up, down, weights, wrong)
    others = torch.arange(21) != 4
    assert torch.equal(spoilt[others], got[others])
    one = moe_experts(x[4:5], gate_up, down, weights[4:5], wrong[4:5])
    assert torch.equal(one, torch.zeros_like(one))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routing(dtype, poison):
    for tokens, num_experts, top_k, seed in ((3, 1, 1, 0), (9, 60, 8, 1), (4, 129, 5, 2), (5, 8, 8, 3)):
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

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(2, 5):
            logits.copy_(randn(tokens, 32, dtype=dtype, seed=seed))
            if seed == 4:
                logits[:, :4] += 100  # all tokens go to four experts
            graph.replay()
            assert torch.equal(captured, step())
