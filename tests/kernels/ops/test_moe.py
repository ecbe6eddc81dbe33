"""The references of `moe_route` and `moe_experts`, against the definitions written out token by token in float64."""

import pytest
import torch

from nanovllm.kernels import moe_experts, moe_route
from nanovllm.kernels.ops import moe_experts as experts_op


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("tokens, num_experts, top_k", [(1, 1, 1), (7, 5, 5), (20, 33, 4), (0, 4, 2)])
def test_routing_token_by_token(tokens, num_experts, top_k, renormalise, dtype):
    logits = randn(tokens, num_experts, dtype=dtype)
    weights, experts = moe_route(logits, top_k, renormalise)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    assert weights.shape == experts.shape == (tokens, top_k)
    for t in range(tokens):
        row = logits[t].double()
        want = sorted(range(num_experts), key=lambda e: (-float(row[e]), e))[:top_k]
        assert experts[t].tolist() == want
        shares = row.exp() / row.exp().sum()
        shares = shares[want] / (shares[want].sum() if renormalise else 1)
        torch.testing.assert_close(weights[t].double(), shares, rtol=1e-5, atol=0)


def test_routing_is_that_of_transformers():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    for renormalise in (True, False):
        config = Qwen3MoeConfig(hidden_size=24, num_experts=17, num_experts_per_tok=5, norm_topk_prob=renormalise)
        router = Qwen3MoeTopKRouter(config)
        router.weight.data = randn(17, 24)
        with torch.no_grad():
            logits, want_weights, want_experts = router(randn(30, 24, seed=1))
        weights, experts = moe_route(logits, 5, renormalise)
        assert torch.equal(experts.long(), want_experts)
        torch.testing.assert_close(weights, want_weights)


def test_equal_logits_go_to_lower_experts_first():
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0.0, -0.0, 0, -1, -0.0]])
    assert moe_route(logits, 4, True)[1].tolist() == [[1, 2, 4, 0], [0, 1, 2, 4]]


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_finite_whatever_the_logits_are(renormalise):
    bad, inf = torch.nan, torch.inf
    logits = torch.tensor([[bad] * 4, [-inf] * 4, [inf] * 4, [inf, -inf, bad, 0], [3e38, -3e38, 3e38, 0]])
    weights, experts = moe_route(logits, 2, renormalise)
    assert weights.isfinite().all() and (weights >= 0).all()
    assert experts.tolist() == [[0, 1], [0, 1], [0, 1], [0, 3], [0, 2]]


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_more_or_fewer_experts_than_there_are(top_k):
    with pytest.raises(ValueError, match=f"moe_route: top_k: expected 1 to 4, .* not {top_k}"):
        moe_route(torch.zeros(2, 4), top_k, True)


def token_by_token(x, gate_up, down, weights, experts):
    x, gate_up, down, weights = (t.double() for t in (x, gate_up, down, weights))
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], experts[t].tolist()):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            out[t] += weight * (down[e] @ (gate * gate.sigmoid() * up))
    return out


# The last token has one expert twice.
CHOICES = {
    "spread": [[0, 1], [2, 3], [1, 4], [3, 3]],
    "one expert": [[2, 2]] * 4,
    "none for most": [[4, 0]] * 3 + [[0, 0]],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_experts_token_by_token(choices, device):
    x, gate_up, down = randn(4, 12), randn(5, 14, 12, seed=1), randn(5, 12, 7, seed=2)
    weights, experts = torch.rand(4, 2, generator=torch.Generator().manual_seed(3)), torch.tensor(choices).int()
    on = [t.to(device) for t in (x, gate_up, down, weights, experts)]
    with moe_experts.use("native"):
        got = moe_experts(*on).cpu()
    torch.testing.assert_close(got.double(), token_by_token(x, gate_up, down, weights, experts), rtol=1e-4, atol=1e-4)


def test_an_expert_that_does_not_exist():
    x, gate_up, down, weights = randn(2, 12), randn(5, 14, 12), randn(5, 12, 7), torch.zeros(2, 2)
    for wrong in (5, -1):
        experts = torch.tensor([[0, 1], [2, wrong]]).int()
        with (
            pytest.raises(ValueError, match=f"experts: token 1 has expert {wrong}, expected 0 to 4"),
            moe_experts.use("native"),
        ):
            moe_experts(x, gate_up, down, weights, experts)
    with pytest.raises(ValueError, match=r"moe_experts: down: expected the shape .* with .*intermediate=7"):
        moe_experts(x, gate_up, randn(5, 12, 6), weights, torch.zeros(2, 2).int())


def test_bytes_of_experts_without_a_token_do_not_count():
    x, gate_up, down = randn(3, 12), randn(5, 14, 12), randn(5, 12, 7)
    weights, experts = torch.zeros(3, 2), torch.tensor([[1, 4]] * 3).int()
    cost = experts_op.cost(x, gate_up, down, weights, experts)
    assert cost.bytes == 4 * (2 * x.numel() + 6 + 6 + 2 * (14 * 12 + 12 * 7)) and cost.flops == 6 * 6 * 12 * 7
