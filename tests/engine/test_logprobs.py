"""Log-probabilities of tokens, against float64, and the dicts that requests get."""

import time

import pytest
import torch

from nanovllm.engine.logprobs import LogprobsTensors, compute_logprobs

VOCAB = 40
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def random_logits(rows, device):
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, VOCAB, VOCAB + 9])
def test_logprobs_match_float64(k, dtype, device):
    logits = (random_logits(7, device) * 5 + 100).to(dtype)
    tokens = torch.tensor([0, 5, 39, 7, 7, 1, 2], device=device)
    got = compute_logprobs(logits, tokens, k)
    expected = logits.double().log_softmax(-1)
    k = min(k, VOCAB)
    assert got.token_ids.shape == got.logprobs.shape == (7, 1 + k) and got.ranks.shape == (7,)
    assert (got.token_ids.dtype, got.logprobs.dtype, got.ranks.dtype) == (torch.int64, torch.float32, torch.int64)
    assert torch.equal(got.token_ids[:, 0], tokens)
    torch.testing.assert_close(got.logprobs.double(), expected.gather(-1, got.token_ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logprobs[:, 1:].double(), expected.topk(k).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.ranks, (logits > logits.gather(-1, tokens[:, None])).sum(-1) + 1)


def test_prompt_logprobs_of_no_tokens(device):
    logits, tokens = random_logits(0, device), torch.zeros(0, dtype=torch.int64, device=device)
    assert compute_logprobs(logits, tokens, 4).logprobs.shape == (0, 5)


def test_a_row_becomes_a_dict_with_the_own_token_first():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0]])
    expected = logits.double().log_softmax(-1)[0].tolist()
    rare = compute_logprobs(logits, torch.tensor([0]), 3).cpu().row(0, 3)
    assert list(rare)[0] == 0 and set(rare) == {0, 1, 3, 4}
    assert {i: r.rank for i, r in rare.items()} == {0: 5, 1: 1, 3: 1, 4: 3}
    assert all(r.logprob == pytest.approx(expected[i], abs=1e-6) and r.decoded_token is None for i, r in rare.items())
    common = compute_logprobs(logits, torch.tensor([4]), 3)
    assert {i: r.rank for i, r in common.row(0, 3).items()} == {4: 3, 1: 1, 3: 1}
    # A request that wants fewer than the batch's most, down to its own token alone.
    assert len(common.row(0, 1)) == 2 and list(common.row(0, 0)) == [4]


def test_the_ranks_of_many_take_linear_time():
    """A dictionary of the whole vocabulary, with many equal values."""
    values = torch.arange(100_000, 0, -1) // 3
    tensors = LogprobsTensors(torch.arange(100_000)[None], -1.0 / values[None], torch.tensor([1]))
    start = time.perf_counter()
    row = tensors.row(0, 99_999)
    assert time.perf_counter() - start < 2  # a search for each would take a minute
    assert len(row) == 100_000 and [row[i].rank for i in (1, 2, 3, 4, 5)] == [1, 2, 2, 2, 5]
