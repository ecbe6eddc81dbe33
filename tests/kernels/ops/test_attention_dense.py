"""Attention over a dense cache: against one query at a time, with padding anywhere; and the kernels for it."""

import pytest
import torch

from nanovllm.kernels import attention_dense

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Left, right, in the middle, none, and of prompts of which the queries are the last tokens.
MASKS = [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]


def plan(mask, queries):
    """`visible` and `tokens` of a padding mask [batch, length], of which the last slots are the queries'."""
    mask = torch.tensor(mask, dtype=torch.bool)
    seen = mask.cumsum(1).masked_fill(~mask, 0)[:, -queries:]
    return seen.int().to(DEVICE), torch.argsort(~mask, dim=1, stable=True).int().to(DEVICE)


def one_by_one(q, k, v, mask, scale, window=None, soft_cap=None):
    """Each query of each head by itself, in float64."""
    batch, heads, queries, dim = q.shape
    out = torch.zeros(batch, queries, heads, dim, dtype=torch.float64)
    group = heads // k.shape[1]
    for b in range(batch):
        for i in range(queries):
            last = k.shape[2] - queries + i
            slots = [j for j in range(last + 1) if mask[b][j]]
            if not mask[b][last]:
                continue
            slots = slots[-window:] if window else slots
            for h in range(heads):
                keys, values = (x[b, h // group, slots].double().cpu() for x in (k, v))
                scores = keys @ q[b, h, i].double().cpu() * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[b, i, h] = scores.softmax(0) @ values
    return out


def check(provider, queries, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, queries, 16, generator=generator).to(DEVICE, dtype)
    k, v = (torch.randn(4, 2, 7, 16, generator=generator).to(DEVICE, dtype) for _ in range(2))
    visible, tokens = plan(MASKS, queries)
    with attention_dense.use(provider):
        got = attention_dense(q, k, v, visible, 0.25, tokens, **options)
    torch.testing.assert_close(got.double().cpu(), one_by_one(q, k, v, MASKS, 0.25, **options), rtol=1e-4, atol=1e-5)


OPTIONS = [{}, {"window": 2}, {"soft_cap": 1.5}]


@pytest.mark.parametrize("queries", [1, 3, 7])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference(queries, options):
    check("native", queries, **options)


@pytest.mark.triton
@pytest.mark.parametrize("queries", [1, 3, 7])
def test_the_kernels(queries):
    pytest.importorskip("triton")
    check("triton", queries, window=3)


@pytest.mark.triton
@pytest.mark.parametrize("length", [9, 64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3)], ids=str)
def test_memory_in_any_order(order, length):
    """Dimensions in other orders, a gap after every element, and a sequence that is every sequence."""
    pytest.importorskip("triton")
    shape = [2, 2, length, 16]
    back = [order.index(i) for i in range(4)]
    k, v = (torch.randn(*(shape[i] for i in order), device=DEVICE).permute(back) for _ in range(2))
    q, visible = torch.randn(2, 2, 1, 16, device=DEVICE), torch.tensor([[5], [length]], device=DEVICE).int()
    gaps = torch.randn(2, 2, length, 32, device=DEVICE)[..., ::2]
    for keys, values in ((k, v), (k, gaps), (k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))):
        results = []
        for provider in ("native", "triton"):
            with attention_dense.use(provider):
                results.append(attention_dense(q, keys, values, visible, 0.25))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(1, 3, 1, 16)}, "q: expected a multiple of the 2 heads of k, not 3"),
        ({"visible": torch.ones(1, 1)}, "visible: expected int32"),
        ({"tokens": torch.zeros(1, 4, dtype=torch.int32)}, "tokens: expected the shape"),
        ({"window": 0}, "window: expected None or at least 1, not 0"),
        ({"soft_cap": -1.0}, "soft_cap: expected None or a positive number"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {
        "q": torch.zeros(1, 4, 1, 16), "k": torch.zeros(1, 2, 5, 16), "v": torch.zeros(1, 2, 5, 16),
        "visible": torch.ones(1, 1, dtype=torch.int32), "scale": 0.25,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        attention_dense(**arguments | change)
