"""Products of experts with many pairs on Hopper: against float64 there; elsewhere which calls they take."""

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)

from nanovllm.kernels.triton.moe.experts import moe_experts
from nanovllm.kernels.triton.moe.hopper_experts import (
    LEAST_PAIRS,
    HopperExpertPlan,
    fits,
    hopper_experts,
    plan_for,
    plan_hopper_experts,
)
from nanovllm.kernels.triton.moe.route import moe_route
from nanovllm.kernels.triton.moe.sort import sort_pairs
from tests.kernels.triton.common import graph_of, randn, strided

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
BF16 = torch.bfloat16
RELATIVE = {torch.bfloat16: 1.6e-2, torch.float16: 4e-3}


def on_hopper(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")(test))


def routed(tokens, num_experts, top_k, seed=0):
    """Experts of each token: uneven; every token has expert 0, and the last expert has none."""
    scores = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    scores *= torch.linspace(0.5, 1.5, num_experts)
    scores[:, 0] += 9
    scores[:, -1] -= 9
    return scores.topk(top_k, -1).indices.int().cuda()


def weights_of(num_experts, intermediate, hidden, dtype):
    gate_up = randn(num_experts, 2 * intermediate, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    return gate_up, randn(num_experts, hidden, intermediate, dtype=dtype, seed=2, scale=intermediate**-0.5)


def near(got, want, dtype):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=RELATIVE[dtype] * max(1.0, want.abs().max().item()))


@on_hopper
@pytest.mark.parametrize("slots", [3, 4])
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("tokens, num_experts, top_k, intermediate, hidden, rows", [
    (1, 2, 1, 64, 64, "as they are"), (129, 3, 2, 192, 320, "strided"), (1001, 9, 4, 192, 2048, "strided"),
    (777, 128, 8, 768, 2048, "as they are"),
])  # fmt: skip
def test_each_product(tokens, num_experts, top_k, intermediate, hidden, rows, dtype, slots):
    """Each pair's product; two pairs have experts that do not exist."""
    view = strided if rows == "strided" else lambda t: t
    x, (gate_up, down) = view(randn(tokens, hidden, dtype=dtype)), weights_of(num_experts, intermediate, hidden, dtype)
    gate_up, down, plan = view(gate_up), view(down), HopperExpertPlan(slots=slots)
    experts = routed(tokens, num_experts, top_k)
    if tokens > 1:
        experts[3, 0], experts[5, top_k - 1] = -1, num_experts
    pairs = sort_pairs(experts, num_experts, plan.tokens)
    inner = hopper_experts(x, gate_up, pairs, top_k, True, plan)
    outputs = hopper_experts(inner, down, pairs, top_k, False, plan)
    flat, place = experts.flatten(), 0
    for expert in range(num_experts):
        of_expert = (flat == expert).nonzero()[:, 0]
        here = slice(place, place := place + len(of_expert))
        assert torch.equal(pairs.order[here].long(), of_expert)
        if len(of_expert):
            gate, up = (x[of_expert // top_k].double() @ gate_up[expert].double().T).chunk(2, -1)
            near(inner[here], F.silu(gate) * up, dtype)
            near(outputs[of_expert], inner[here].double() @ down[expert].double().T, dtype)
    again = hopper_experts(x, gate_up, pairs, top_k, True, plan)
    assert torch.equal(again[:place], inner[:place])
    again = hopper_experts(inner, down, pairs, top_k, False, plan)
    assert torch.equal(again[pairs.order[:place].long()], outputs[pairs.order[:place].long()])


@on_hopper
@pytest.mark.parametrize("tokens", [1024, 5001])
def test_the_op_in_a_graph(tokens):
    """One graph serves any routing: all tokens to two experts, or to all but some. It has the bits of an eager call."""
    gate_up, down = weights_of(16, 192, 512, BF16)
    x, logits = randn(tokens, 512, dtype=BF16), randn(tokens, 16, dtype=BF16, seed=3)
    assert plan_for(x, gate_up, down, 2 * tokens)

    def step():
        return moe_experts(x, gate_up, down, *moe_route(logits, 2, True))

    graph, captured = graph_of(step)
    for seed in range(4, 7):
        logits.copy_(randn(tokens, 16, dtype=BF16, seed=seed))
        logits[:, 3:5] += 100 * (seed - 5)
        graph.replay()
        assert torch.equal(captured, step())
        weights, experts = moe_route(logits, 2, True)
        want = torch.zeros(tokens, 512, dtype=torch.double, device="cuda")
        for expert in range(16):
            token, choice = (experts == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
            products = (F.silu(gate) * up) @ down[expert].double().T
            want.index_add_(0, token, products * weights[token, choice, None])
        near(captured, want, BF16)


def test_which_calls_are_taken():
    """Those of so many pairs an expert as were faster, with rows that the copy engine can read."""
    assert plan_hopper_experts(LEAST_PAIRS * 128 - 1, 128) is None
    slots = [plan_hopper_experts(tokens * 8, 128).slots for tokens in (1024, 2048, 8192, 16384)]
    assert slots == [4, 4, 3, 3]
    good = torch.empty(7, 128, dtype=BF16), torch.empty(3, 192, 128, dtype=BF16), torch.empty(3, 128, 192, dtype=BF16)
    assert fits(*good) and fits(torch.empty(7, 136, dtype=BF16)[:, :128], *good[1:])
    assert not fits(torch.empty(7, 129, dtype=BF16)[:, :128], *good[1:])  # rows of odd addresses
    assert not fits(*(t.float() for t in good)) and not fits(good[0].half(), *good[1:])
    assert not fits(good[0], torch.empty(3, 96, 128, dtype=BF16), torch.empty(3, 128, 48, dtype=BF16))
    assert plan_for(*good, LEAST_PAIRS * 3) is None  # not on a GPU
